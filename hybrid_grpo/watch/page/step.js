// One step from the inside: its stages by rank, its decoder, and how its numbers are distributed.
import { ask, byId, el, number, whole } from "./dom.js";
import { Decoder } from "./decoder.js";
import { box, drawing } from "./drawing.js";
import { Frame } from "./frame.js";
import { Heat } from "./heat.js";
import { Layers } from "./layers.js";
import { offerRuns } from "./runs.js";
import { partColor, remember, state } from "./state.js";
import { facts } from "./tip.js";
import { Waterfall } from "./waterfall.js";

const NAMES = { reward: "Rewards", length: "Lengths", advantage: "Advantages", entropy: "Entropies", ratio: "Ratios" };
const title = name => NAMES[name] ?? name.replaceAll("_", " ");
const percent = share => `${number(100 * share)} %`;
let run = null,
  turn = 0,
  kept = null;

const runs = el("select", { "aria-label": "Run", onchange: () => choose(runs.value) });
const slider = el("input", {
  type: "range",
  class: "steps",
  "aria-label": "Step",
  // A frozen page has some steps only: there the slider says which of them.
  oninput: () => go(kept ? kept[Number(slider.value)] : Number(slider.value)),
});
const newest = el(
  "button",
  { type: "button", class: "main", "aria-pressed": "true", onclick: () => go(null) },
  "Newest",
);
const status = el("p", { class: "soft", role: "status" });
const time = { title: "Where the time of the steps went", unit: "s per step", color: partColor };
const layers = new Layers(time, (first, last) => go(last));
const waterfall = new Waterfall(),
  decoder = new Decoder();
const rest = el("div", { class: "charts pairs" });
const pairs = new Map();

export function startStep() {
  byId("step").append(
    el(
      "form",
      { class: "tools search", onsubmit: event => event.preventDefault() },
      el("label", {}, "Run", runs),
      el("label", { class: "step-label" }, "Step", slider),
      newest,
    ),
    status,
    el("div", { class: "charts" }, layers.card, waterfall.card, decoder.card),
    rest,
    el("p", { class: "hint" }, "The slider takes the arrow keys too. Newest follows the run while it trains."),
  );
}

export function showStep() {
  offerRuns(runs);
  if (!state.open.includes(run)) {
    // A step in the page's address is that of the first run.
    if (run) state.step = null;
    run = state.open[0] ?? null;
  }
  runs.value = run ?? "";
  draw();
}

function choose(name) {
  run = name;
  go(null);
}

// to: a step, or null to follow the newest.
function go(to) {
  state.step = to;
  remember();
  draw();
}

async function draw() {
  const mine = ++turn;
  newest.setAttribute("aria-pressed", String(state.step === null));
  const [answer, times] = run
    ? await Promise.all([ask("step", { run, step: state.step }), ask("times", { run })])
    : [null, null];
  if (mine !== turn) return;
  layers.card.hidden = !times;
  if (times) layers.show(times);
  const details = answer?.details;
  slider.disabled = !details;
  waterfall.card.hidden = !details?.stages?.flat().length;
  decoder.card.hidden = !details?.decoder?.some(Boolean);
  if (!details) {
    rest.replaceChildren();
    status.textContent = run ? "This run has no traces of its steps (log.details)." : "Choose a run on the left.";
    return;
  }
  const [first, last] = answer.steps;
  kept = answer.kept ?? null;
  if (kept) Object.assign(slider, { min: 0, max: kept.length - 1, value: kept.indexOf(details.step) });
  else Object.assign(slider, { min: first, max: last, value: details.step });
  slider.setAttribute("aria-valuetext", `step ${details.step}`);
  const noted = answer.histograms,
    apart = noted && noted.step !== details.step ? ` Distributions are those of step ${whole(noted.step)}.` : "";
  status.textContent =
    `Step ${whole(details.step)} of ${whole(first)} to ${whole(last)}.` +
    (kept ? ` In this file: ${kept.map(whole).join(", ")}.` : "") +
    (answer.read < 1 ? ` Distributions: ${Math.floor(100 * answer.read)} % read.` : apart);
  if (!waterfall.card.hidden) waterfall.show(details.stages);
  if (!decoder.card.hidden) decoder.show(details.decoder);
  const names = Object.keys(noted?.by_name ?? {});
  for (const name of names) {
    if (!pairs.has(name)) pairs.set(name, makePair(name));
    drawPair(name, noted, answer.over_time[name], details.step);
  }
  const cards = names.flatMap(name => pairs.get(name).cards);
  // Cards that stay keep the keyboard's place.
  if (cards.some((card, at) => rest.children[at] !== card) || rest.children.length !== cards.length)
    rest.replaceChildren(...cards);
  if (answer.read < 1 && state.view === "step") setTimeout(() => mine === turn && draw(), 50);
}

function makePair(name) {
  const bars = new Frame({ title: title(name), tall: 140, hint: "The arrow keys read bars." }),
    time = new Heat({
      title: `${title(name)} over time`,
      tall: 140,
      hint: "The arrow keys read cells, enter opens the step.",
    });
  return { bars, time, cards: [bars.card, time.card] };
}

function drawPair(name, { step: of, by_name: noted }, over, now) {
  const { edges, counts } = noted[name],
    { bars, time } = pairs.get(name);
  const low = edges[0],
    width = edges.at(-1) - low || 1,
    most = Math.max(...counts),
    total = counts.reduce((sum, count) => sum + count, 0);
  const place = at => [
    (edges[at] - low) / width,
    1 - counts[at] / most,
    (edges[at + 1] - edges[at]) / width || 1,
    counts[at] / most,
  ];
  bars.labels([low, low + width / 2, edges.at(-1)].map(number));
  bars.show({
    words: `${whole(total)} values of step ${of}, from ${number(low)} to ${number(edges.at(-1))}.`,
    picture: drawing(...counts.map((_, at) => box(...place(at), { fill: "var(--c0)", opacity: 0.85 }))),
    count: counts.length,
    box: place,
    under: left => counts.findIndex((_, at) => left < place(at)[0] + place(at)[2]),
    say: at =>
      facts(`${number(edges[at])} to ${number(edges[at + 1])}`, [
        ["values", whole(counts[at])],
        ["share", percent(counts[at] / total)],
      ]),
  });
  time.card.hidden = !over;
  if (!over) return;
  const rows = over.shares.length,
    columns = over.steps.length,
    // A bucket that holds everything would leave no colours to the others.
    top = over.shares.flat().sort((a, b) => a - b)[Math.floor(0.99 * rows * columns)] || 1;
  time.show({
    values: [...over.shares].reverse().map(line => line.map(share => share || null)),
    ends: [0, top],
    x: [0, Math.floor(columns / 2), columns - 1].map(at => `step ${whole(over.steps[at])}`),
    y: [number(over.edges.at(-1)), number(over.edges[0])],
    words: `Shares of the values at ${columns} steps; shown: step ${now}.`,
    say: (row, column) => {
      const at = rows - 1 - row;
      return facts(`step ${whole(over.steps[column])}`, [
        ["values", `${number(over.edges[at])} to ${number(over.edges[at + 1])}`],
        ["share", percent(over.shares[at][column])],
      ]);
    },
    pick: (_, column) => go(over.steps[column]),
  });
}
