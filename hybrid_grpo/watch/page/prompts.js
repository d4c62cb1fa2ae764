// The difficulty map: which prompts the policy solves, and since when.
import { ask, byId, el, number, whole } from "./dom.js";
import { frozen } from "./frozen.js";
import { Heat } from "./heat.js";
import { Layers } from "./layers.js";
import { offerRuns } from "./runs.js";
import { state } from "./state.js";
import { facts } from "./tip.js";
import { valueAt } from "./together.js";

const ROWS = 160,
  COLUMNS = 240,
  CLOSE = 40,
  MOST_STEPS = 4000;
const SHARES = { solved: "var(--good)", partly: "var(--warm)", never: "var(--faint)" };
const ORDERS = { mean: "mean reward, hardest first", last: "newest reward, lowest first", row: "row in the data" };
let run = null,
  part = null,
  open = () => {},
  turn = 0;

const runs = el("select", { "aria-label": "Run", onchange: () => choose(runs.value) });
const order = el(
  "select",
  { onchange: () => look(null) },
  el("option", { value: "" }, "automatic"),
  ...Object.entries(ORDERS).map(([name, label]) => el("option", { value: name }, label)),
);
const all = el(
  "button",
  { type: "button", class: "main", hidden: true, onclick: () => look(null) },
  "Show all prompts",
);
const status = el("p", { class: "soft", role: "status" });
const map = new Heat({
  title: "Mean reward of each prompt over the steps",
  tall: 520,
  hint: "The arrow keys read cells, enter opens one.",
});

const stack = new Layers(
  {
    title: "Prompts solved by all of their completions, by some (partly) or by none (never)",
    color: name => SHARES[name],
    amount: share => `${Math.round(100 * share)} %`,
    whole: () => "",
  },
  (first, last) => open(run, { first, last }),
);

// openSamples(run, query): shows completions.
export function startPrompts(openSamples) {
  open = openSamples;
  map.card.classList.add("wide");
  byId("prompts").append(
    el(
      "form",
      { class: "tools search", onsubmit: event => event.preventDefault() },
      el("label", {}, "Run", runs),
      el("label", {}, "Order by", order),
      all,
    ),
    status,
    el("div", { class: "charts" }, stack.card, map.card),
    el(
      "p",
      { class: "hint" },
      "Each row of the map is a prompt, or several where not all of them fit. A click zooms in, " +
        "and finally opens the completions. Cells without a colour: no prompt of the row was drawn in these steps.",
    ),
  );
}

export function showPrompts() {
  offerRuns(runs);
  if (!state.open.includes(run)) {
    run = state.open[0] ?? null;
    part = null;
  }
  runs.value = run ?? "";
  draw();
}

function choose(name) {
  run = name;
  look(null);
}

function look(range) {
  part = range;
  draw();
}

async function draw() {
  const mine = ++turn;
  all.hidden = !part;
  if (!run) {
    map.card.hidden = stack.card.hidden = true;
    status.textContent = "Choose a run on the left.";
    return;
  }
  const answer = await ask("prompts", {
    run,
    order: order.value,
    rows: ROWS,
    columns: COLUMNS,
    low: part?.[0],
    high: part?.[1],
  });
  if (mine !== turn) return;
  const hasStack = await drawStack(run);
  if (mine !== turn) return;
  const reading = answer.read < 1 ? `, ${Math.floor(100 * answer.read)} % read` : "";
  map.card.hidden = !answer.prompts;
  if (!answer.prompts) {
    status.textContent = reading ? `Reading${reading} …` : "This run has no rewards by prompt (log.details).";
  } else {
    const count = part ? `${whole(answer.high - answer.low)} of ${whole(answer.prompts)}` : whole(answer.prompts);
    status.textContent = `${count} prompts by ${ORDERS[answer.order]}, steps ${whole(answer.first)} to ${whole(answer.last)}${reading}.`;
    show(answer);
    // A map of prompts that were drawn once has a mark in each row.
    map.card.hidden = hasStack && !order.value && answer.order === "row";
  }
  if (reading && state.view === "prompts") setTimeout(() => mine === turn && draw(), 50);
}

async function drawStack(run) {
  const names = ["group/all_right_frac", "group/all_wrong_frac"],
    found = await ask("curves", { run: [run], name: names, axis: "step", window: "1", points: MOST_STEPS }),
    [[steps, right], wrong] = names.map(name => found[run].curves[name].raw ?? [[], []]);
  stack.card.hidden = !steps.length || !wrong[0].length;
  if (stack.card.hidden) return false;
  const wide = Math.ceil(steps.length / (COLUMNS / 2)),
    starts = [...steps.keys()].filter(at => at % wide === 0),
    part = (values, at) => values.slice(at, at + wide),
    mean = values => starts.map(at => part(values, at).reduce((sum, value, _, all) => sum + value / all.length, 0));
  const solved = mean(right),
    never = mean(steps.map(step => valueAt(wrong, step))),
    values = { solved, partly: solved.map((share, at) => Math.max(0, 1 - share - never[at])), never };
  stack.show({
    steps: starts.map(at => [steps[at], part(steps, at).at(-1)]),
    layers: Object.entries(values).map(([name, values]) => ({ name, values, total: values.reduce((a, b) => a + b) })),
  });
  return true;
}

function show(answer) {
  const rows = answer.means.length,
    columns = answer.means[0].length,
    { low, high, first, last, tall, wide } = answer;
  const stepsOf = column => [first + column * wide, Math.min(last, first + (column + 1) * wide - 1)],
    promptsOf = row => [low + row * tall + 1, Math.min(high, low + (row + 1) * tall)];
  const span = (name, [low, high]) =>
    low === high ? `${name} ${whole(low)}` : `${name}s ${whole(low)} to ${whole(high)}`;
  const rowOf = row =>
    answer.names ? `prompt ${answer.names[row]}` : `${span("prompt", promptsOf(row))} of the order`;
  map.show({
    values: answer.means,
    x: [first, stepsOf(Math.floor(columns / 2))[0], last].map(step => `step ${whole(step)}`),
    y: [rowOf(0), rowOf(rows - 1)].map(text => text.replace(" of the order", "")),
    words: `${whole(high - low)} prompts by ${ORDERS[answer.order]}.`,
    say: (row, column) => {
      const count = answer.counts[row][column];
      return facts(`${rowOf(row)}, ${span("step", stepsOf(column))}`, [
        ["mean reward", count ? number(answer.means[row][column]) : "not drawn"],
        ["groups", whole(count)],
      ]);
    },
    pick: (row, column) => {
      const [from, to] = stepsOf(column);
      // A frozen page has no other cells than these.
      if (frozen && !answer.names) return;
      if (answer.names) return open(run, { prompt: answer.names[row], first: from, last: to });
      const start = Math.max(0, Math.min(answer.prompts - CLOSE, promptsOf(row)[0] - CLOSE / 2));
      look([start, Math.min(answer.prompts, start + CLOSE)]);
    },
  });
}
