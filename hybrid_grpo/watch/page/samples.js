// Completions of a run by prompt: found by what they say and what they were given, and one of them in full.
import { ask, byId, el, number, rounded, whole } from "./dom.js";
import { frozen } from "./frozen.js";
import { groups } from "./group.js";
import { offerRuns } from "./runs.js";
import { completion, marked } from "./sample.js";
import { remember, state } from "./state.js";

const SHOWN = 200,
  // Prompts on a page, wide and on a phone.
  ON_A_PAGE = [40, 8];
// The server orders by these numbers, over all completions; by other columns, what is loaded is ordered here.
const NUMBERS = ["reward", "advantage", "length"];
const FIELDS = ["text", "first", "last", "prompt", "least", "most", "finish"];
let rows = [],
  // What the page lists: completions that are alike as one, with all their rows.
  items = [],
  page = 0,
  next = null,
  read = 0,
  sorted = { by: "step", up: false },
  chosen = null,
  run = null,
  steps = null,
  kept = null;
let turn = 0;
const field = (name, label, attributes) => el("label", {}, label, el("input", { name, ...attributes }));
const bounds = (label, low, high, attributes) =>
  el(
    "span",
    { class: "bounds" },
    field(low, label, { type: "number", ...attributes }),
    field(high, "–", { type: "number", "aria-label": `${label} to`, ...attributes }),
  );
const form = el(
  "form",
  {
    class: "tools search",
    onsubmit: event => {
      event.preventDefault();
      search();
    },
  },
  el("button", { type: "button", class: "main filters", onclick: () => form.classList.toggle("open") }, "Filters"),
  el("label", { class: "always" }, "Run", el("select", { name: "run", onchange: () => open(form.elements.run.value) })),
  field("text", "", { type: "search", placeholder: "Words of prompt or answer", "aria-label": "Contains" }),
  bounds("Steps", "first", "last", { min: 0 }),
  field("prompt", "Prompt", { type: "number", min: 0, placeholder: "row" }),
  bounds("Rewards", "least", "most", { step: "any" }),
  el("select", { name: "finish", "aria-label": "Ended by" }, el("option", { value: "" }, "any end")),
  el("button", { type: "submit", class: "main" }, "Search"),
);
const status = el("p", { class: "soft", role: "status" });
const body = el("tbody");
const HEADS = { step: "Step", reward: "Reward", advantage: "Advantage", length: "Tokens", finish: "Ended by" };
const head = el(
  "tr",
  {},
  ...Object.entries({ ...HEADS, completion: "Completion" }).map(([name, label]) =>
    el(
      "th",
      { scope: "col", "data-name": name, "aria-sort": "none" },
      el("button", { type: "button", onclick: () => sort(name) }, label),
    ),
  ),
);
const turnPage = by => el("button", { type: "button", onclick: () => turnTo(page + by) }, by < 0 ? "Previous" : "Next");
const pages = [turnPage(-1), el("span", { class: "soft" }), turnPage(1)];
const detail = el("section", {
  class: "detail card",
  "aria-label": "Completion. j and k show the next and the one before.",
  tabindex: -1,
  hidden: true,
  onkeydown: event => walk(event),
});
const around = el("section", { class: "around card", "aria-label": "Group", tabindex: -1, hidden: true });

export function startSamples() {
  byId("samples").append(
    form,
    status,
    around,
    el(
      "div",
      { class: "found" },
      el(
        "div",
        {},
        el("div", { class: "scroll card" }, el("table", { class: "rows" }, el("thead", {}, head), body)),
        el("div", { class: "pages" }, ...pages),
      ),
      detail,
    ),
    el(
      "p",
      { class: "hint" },
      "With the keyboard: tab to the list, ↓ ↑ to move, enter to open; then j and k for the next ones.",
    ),
  );
}

export function showSamples() {
  const select = form.elements.run;
  offerRuns(select);
  if (!state.open.includes(run)) {
    const { query, sample } = state;
    open(state.open[0] ?? null, query);
    if (sample && run) read_one({ step: sample[0], offset: sample[1] });
  }
  select.value = run ?? "";
}

// Completions of a run by what the search form has: its fields by name.
function open(name, query = null) {
  run = name;
  chosen = null;
  detail.hidden = around.hidden = true;
  form.elements.finish.replaceChildren(el("option", { value: "" }, "any end"));
  if (query) {
    form.reset();
    form.elements.run.value = name;
    if (query.finish) form.elements.finish.append(el("option", { value: query.finish }, query.finish));
    for (const field of FIELDS) form.elements[field].value = query[field] ?? "";
  }
  search();
}

async function search(from = null) {
  const mine = ++turn;
  if (!from) {
    rows = [];
    read = page = 0;
  }
  if (!run) {
    status.textContent = "Choose a run on the left.";
    show();
    return;
  }
  const query = Object.fromEntries(FIELDS.map(name => [name, form.elements[name].value.trim()]));
  state.query = query;
  state.sample = chosen && [chosen.step, chosen.offset];
  remember();
  const order = NUMBERS.includes(sorted.by) && !frozen ? { order: sorted.by, rising: sorted.up ? 1 : "" } : {};
  let found = [],
    count = 0;
  do {
    status.textContent = from ? `Searching step ${from[0]} …` : "Searching …";
    const place = { step: from?.[0], offset: from?.[1] };
    const answer = await ask("samples", { run, ...query, ...order, ...place }).catch(error => ({
      rows: [],
      read: 0,
      next: null,
      error,
    }));
    if (mine !== turn) return;
    if (answer.error) {
      status.textContent = answer.error.message;
      return;
    }
    found.push(...answer.rows);
    if (order.order) found = found.sort(compare).slice(0, SHOWN);
    read += answer.read;
    from = next = answer.next;
    ({ steps, kept, count } = answer);
  } while (from && (order.order || found.length < SHOWN));
  rows.push(...found);
  const reasons = form.elements.finish,
    known = new Set([...reasons.options].map(option => option.value));
  for (const reason of new Set(rows.map(row => row.finish)))
    if (!known.has(reason)) reasons.append(el("option", { value: reason }, reason));
  const reach = next ? `, down to step ${next[0]}` : "";
  const saved =
    steps &&
    `Saved: ${whole(count)} step${count === 1 ? "" : "s"}, from ${steps[0]} to ${steps[1]}.${kept ? ` In this file: ${kept.join(", ")}, starting with the groups whose rewards differ most.` : ""}`;
  status.textContent = steps
    ? !read
      ? `${kept ? "No completions of these steps are in this file." : "No completions of these steps were saved (log.rollouts_every)."} ${saved}`
      : `${whole(rows.length)} ${order.order ? `with the ${sorted.up ? "lowest" : "highest"} ${order.order}` : "found"} in ${whole(read)} completions${reach}. ${saved}`
    : "This run has saved no completions (log.rollouts_every).";
  show();
}

function sort(by) {
  sorted = { by, up: sorted.by === by ? !sorted.up : false };
  // All completions are ordered, not only those that are loaded.
  if (!frozen && (NUMBERS.includes(by) || by === "step")) search();
  else show();
}

// What has no value comes last. A frozen page has the completions that tell most first. By steps, groups whose rewards
// differ come first: the others teach nothing.
function compare(a, b) {
  const { by, up } = sorted,
    [one, other] = [a[by] ?? null, b[by] ?? null],
    place = row => row.rank ?? (by === "step" && row.group !== null ? row.group : row.offset);
  const first = one === other ? 0 : one === null ? 1 : other === null ? -1 : (one < other ? -1 : 1) * (up ? 1 : -1);
  const mixed = by === "step" && isMixed(b) - isMixed(a);
  return first || b.step - a.step || mixed || place(a) - place(b) || b.reward - a.reward || a.offset - b.offset;
}

const isMixed = row => new Set(row.rewards).size > 1;
const groupOf = row => `${row.step} ${row.group ?? row.offset}`;

// Prompts in the order of the rows, each with its completions; equal ones with equal rewards are one.
function prompts() {
  const found = [];
  for (const row of rows) {
    if (!found.length || groupOf(found.at(-1)[0][0]) !== groupOf(row)) found.push([]);
    const alike = found.at(-1).find(([one]) => one.same === row.same && one.reward === row.reward);
    if (alike) alike.push(row);
    else found.at(-1).push([row]);
  }
  return found;
}

async function turnTo(number) {
  if (number * perPage() >= prompts().length) await search(next);
  page = number;
  show();
  form.scrollIntoView({ block: "nearest" });
}

const perPage = () => ON_A_PAGE[innerWidth > 860 ? 0 : 1];

function show() {
  const { by, up } = sorted,
    wanted = form.elements.text.value.trim();
  rows.sort(compare);
  for (const cell of head.children)
    cell.setAttribute("aria-sort", cell.dataset.name === by ? (up ? "ascending" : "descending") : "none");
  const all = prompts(),
    [first, last] = [page * perPage(), Math.min(all.length, (page + 1) * perPage())],
    shown = all.slice(first, last);
  items = shown.flat();
  const linesOf = group => [heading(group[0][0], wanted), ...group.map(item => line(item, wanted))];
  body.replaceChildren(...shown.flatMap(linesOf));
  const [before, where, after] = pages;
  before.hidden = !page;
  after.hidden = last >= all.length && !next;
  const ends = `Prompts ${first + 1} to ${last} of ${whole(all.length)}${next ? " and older ones" : ""}`;
  where.textContent = all.length ? ends : "";
}

// A prompt, and the rewards of all completions of its group.
function heading(row, wanted) {
  const ordered = (row.rewards ?? []).toSorted((a, b) => b - a),
    rewards = Map.groupBy(ordered, rounded),
    counts = [...rewards].map(([text, { length }]) => (length > 1 ? `${text} ×${length}` : text)),
    // Of many, the highest and the lowest.
    told = counts.length > 5 ? [...counts.slice(0, 3), "…", counts.at(-1)] : counts;
  return el(
    "tr",
    { class: "prompt" },
    el("td", {}, String(row.step)),
    el(
      "td",
      { colspan: 5, class: "text" },
      el("span", { class: isMixed(row) ? "" : "soft" }, `rewards ${told.join(", ")}`),
      el("div", {}, ...marked(row.prompt, wanted)),
    ),
  );
}

function line(item, wanted) {
  const [row] = item,
    tags = [item.length > 1 && `×${item.length}`, row.turns && `${row.turns} turns`].filter(Boolean);
  const text = row.completion ? marked(row.completion, wanted) : [el("span", { class: "soft" }, "(empty)")];
  return el(
    "tr",
    {
      tabindex: 0,
      class: `sample${item.some(one => same(one, chosen)) ? " chosen" : ""}`,
      onclick: () => read_one(row),
      onkeydown: event => press(event, row),
    },
    el("td"),
    el("td", { class: row.reward === null ? "soft" : "" }, rounded(row.reward)),
    el("td", {}, `${row.advantage > 0 ? "+" : ""}${rounded(row.advantage)}`),
    el("td", {}, String(row.length ?? "–")),
    el("td", {}, row.finish ?? "–"),
    el("td", { class: "text" }, el("div", {}, ...tags.map(tag => el("b", { class: "tag" }, tag)), ...text)),
  );
}

const same = (a, b) => a && b && a.step === b.step && a.offset === b.offset;

function press(event, row) {
  const lines = [...body.querySelectorAll(".sample")],
    at = lines.indexOf(event.currentTarget),
    to = { ArrowDown: lines[at + 1], ArrowUp: lines[at - 1] }[event.key];
  if (event.key === "Enter") {
    event.preventDefault();
    read_one(row, true);
  }
  if (to) {
    event.preventDefault();
    to.focus();
  }
}

async function read_one(row, enter = false) {
  chosen = row;
  state.sample = [row.step, row.offset];
  remember();
  for (const [at, line] of body.querySelectorAll(".sample").entries())
    line.classList.toggle("chosen", items[at].some(one => same(one, row)));
  const of = run,
    place = { run, step: row.step, offset: row.offset };
  const [all, tokens, rival] = await Promise.all(["sample", "tokens", "rival"].map(part => ask(part, place))).catch(
    error => [{ error }],
  );
  if (!same(chosen, row) || of !== run) return;
  detail.hidden = false;
  if (all.error) {
    detail.replaceChildren(el("p", { class: "bad" }, all.error.message));
    return;
  }
  const group = () => showGroup(of, all, row.offset);
  detail.replaceChildren(...completion(run, all, tokens, rival, form.elements.text.value.trim(), close, group));
  detail.scrollTop = 0;
  if (!around.hidden) group();
  if (enter || innerWidth < 1100) {
    detail.focus({ preventScroll: true });
    detail.scrollIntoView({ block: "nearest" });
  }
}

async function showGroup(of, all, offset) {
  around.hidden = false;
  const isNew = !around.firstChild;
  if (isNew) around.append(el("p", { class: "soft" }, "Searching …"));
  const found = await groups(of, all, offset, (name, row) => {
    if (name !== run) {
      form.elements.run.value = name;
      open(name, state.query);
    }
    read_one(row);
  }).catch(error => el("p", { class: "bad" }, error.message));
  if (chosen?.offset !== offset || of !== run) return;
  around.replaceChildren(
    el(
      "header",
      {},
      el("h2", {}, `Prompt ${all.prompt_id ?? ""}: all completions, from the best to the worst`),
      el("button", { type: "button", "aria-label": "Close the group", onclick: closeGroup }, "×"),
    ),
    found,
  );
  around.scrollIntoView({ block: "nearest" });
}

function closeGroup() {
  around.hidden = true;
  around.replaceChildren();
  detail.focus({ preventScroll: true });
}

function walk(event) {
  const by = { j: 1, k: -1 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const to = items[items.findIndex(item => item.some(row => same(row, chosen))) + by];
  if (to) read_one(to[0], true);
}

function close() {
  detail.hidden = true;
  closeGroup();
  chosen = state.sample = null;
  remember();
  body.querySelector(".chosen")?.focus();
  show();
}
