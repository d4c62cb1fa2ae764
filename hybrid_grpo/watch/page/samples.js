// Completions of a run: found by what they say and what they were given, and one of them in full.
import { ask, byId, el, number, whole } from "./dom.js";
import { completion, marked } from "./sample.js";
import { state } from "./state.js";

let rows = [],
  next = null,
  read = 0,
  leftOut = 0,
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
    field(high, "to", { type: "number", ...attributes }),
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
  el("label", {}, "Run", el("select", { name: "run", onchange: () => open(form.elements.run.value) })),
  field("text", "Contains", { type: "search", placeholder: "words of the prompt or completion" }),
  bounds("Step from", "first", "last", { min: 0 }),
  field("prompt", "Prompt", { type: "number", min: 0, placeholder: "row" }),
  bounds("Reward from", "least", "most", { step: "any" }),
  el("label", {}, "Ended by", el("select", { name: "finish" }, el("option", { value: "" }, "anything"))),
  el("button", { type: "submit", class: "main" }, "Search"),
);
const status = el("p", { class: "soft", role: "status" });
const body = el("tbody");
const head = el(
  "tr",
  {},
  ...[
    ["step", "Step"],
    ["reward", "Reward"],
    ["advantage", "Advantage"],
    ["length", "Tokens"],
    ["finish", "Ended by"],
    ["prompt", "Prompt"],
    ["completion", "Completion"],
  ].map(([name, label]) =>
    el(
      "th",
      { scope: "col", "data-name": name, "aria-sort": "none" },
      el("button", { type: "button", onclick: () => sort(name) }, label),
    ),
  ),
);
const more = el("button", { type: "button", hidden: true, onclick: () => search(next) }, "Search older steps");
const detail = el("section", { class: "detail card", "aria-label": "Completion", tabindex: -1, hidden: true });

export function startSamples() {
  byId("samples").append(
    form,
    status,
    el(
      "div",
      { class: "found" },
      el(
        "div",
        {},
        el("div", { class: "scroll card" }, el("table", { class: "rows" }, el("thead", {}, head), body)),
        more,
      ),
      detail,
    ),
  );
}

export function showSamples() {
  const select = form.elements.run;
  if (state.open.join() !== [...select.options].map(option => option.value).join())
    select.replaceChildren(...state.open.map(name => el("option", { value: name }, name)));
  if (!state.open.includes(run)) open(state.open[0] ?? null);
  select.value = run ?? "";
}

// Completions of a run by what the search form has: its fields by name.
export function findSamples(name, query) {
  run = name;
  form.reset();
  form.elements.run.value = name;
  for (const [field, value] of Object.entries(query)) form.elements[field].value = value;
  open(name);
}

function open(name) {
  run = name;
  chosen = null;
  detail.hidden = true;
  form.elements.finish.replaceChildren(el("option", { value: "" }, "anything"));
  search();
}

async function search(from = null) {
  const mine = ++turn;
  if (!from) {
    rows = [];
    read = leftOut = 0;
  }
  if (!run) {
    status.textContent = "Choose a run on the left.";
    show();
    return;
  }
  const query = Object.fromEntries(
    ["text", "first", "last", "prompt", "least", "most", "finish"].map(name => [
      name,
      form.elements[name].value.trim(),
    ]),
  );
  const found = [];
  do {
    status.textContent = from ? `Searching step ${from[0]} …` : "Searching …";
    const answer = await ask("samples", { run, ...query, step: from?.[0], offset: from?.[1] }).catch(error => ({
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
    read += answer.read;
    leftOut += answer.left_out ?? 0;
    from = next = answer.next;
    ({ steps, kept } = answer);
  } while (from && found.length < 200);
  rows.push(...found);
  const reasons = form.elements.finish,
    known = new Set([...reasons.options].map(option => option.value));
  for (const reason of new Set(rows.map(row => row.finish)))
    if (!known.has(reason)) reasons.append(el("option", { value: reason }, reason));
  const reach = next ? `, down to step ${next[0]}` : "",
    without = leftOut ? `, without ${whole(leftOut)} of more than 8 MiB` : "";
  const saved = steps && `Saved: steps ${steps[0]} to ${steps[1]}.${kept ? ` In this file: ${kept.join(", ")}, starting with the groups whose rewards differ most.` : ""}`;
  status.textContent = steps
    ? !read && !leftOut
      ? `${kept ? "No completions of these steps are in this file." : "No completions of these steps were saved (log.rollouts_every)."} ${saved}`
      : `${whole(rows.length)} found in ${whole(read)} completions${reach}${without}. ${saved}`
    : "This run has saved no completions (log.rollouts_every).";
  show();
}

function sort(by) {
  sorted = { by, up: sorted.by === by ? !sorted.up : false };
  show();
}

function show() {
  const { by, up } = sorted,
    order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : (a < b ? -1 : 1) * (up ? 1 : -1));
  const wanted = form.elements.text.value.trim();
  // A frozen page has the completions that tell most first.
  const place = row => row.rank ?? row.offset;
  rows.sort((a, b) => order(a[by] ?? null, b[by] ?? null) || b.step - a.step || place(a) - place(b));
  for (const cell of head.children)
    cell.setAttribute("aria-sort", cell.dataset.name === by ? (up ? "ascending" : "descending") : "none");
  body.replaceChildren(
    ...rows.map(row =>
      el(
        "tr",
        {
          tabindex: 0,
          class: same(row, chosen) ? "chosen" : "",
          onclick: () => read_one(row),
          onkeydown: event => press(event, row),
        },
        el("td", {}, String(row.step)),
        el("td", { class: row.reward === null ? "soft" : "" }, row.reward === null ? "none" : number(row.reward)),
        el("td", {}, row.advantage === null ? "–" : `${row.advantage > 0 ? "+" : ""}${number(row.advantage)}`),
        el("td", {}, String(row.length ?? "–")),
        el("td", {}, row.finish ?? "–"),
        el("td", { class: "text" }, el("div", {}, ...marked(row.prompt, wanted))),
        el(
          "td",
          { class: "text" },
          el(
            "div",
            {},
            ...(row.completion ? marked(row.completion, wanted) : [el("span", { class: "soft" }, "(empty)")]),
          ),
        ),
      ),
    ),
  );
  more.hidden = !next;
}

const same = (a, b) => a && b && a.step === b.step && a.offset === b.offset;

function press(event, row) {
  const to = { ArrowDown: event.currentTarget.nextElementSibling, ArrowUp: event.currentTarget.previousElementSibling }[
    event.key
  ];
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
  for (const [at, line] of [...body.children].entries()) line.classList.toggle("chosen", same(rows[at], row));
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
  detail.replaceChildren(...completion(run, all, tokens, rival, form.elements.text.value.trim(), close));
  detail.scrollTop = 0;
  if (enter || innerWidth < 1100) {
    detail.focus({ preventScroll: true });
    detail.scrollIntoView({ block: "nearest" });
  }
}

function close() {
  detail.hidden = true;
  chosen = null;
  body.querySelector(".chosen")?.focus();
  show();
}
