// One step from the inside: its stages by rank.
import { ask, byId, el, whole } from "./dom.js";
import { Layers } from "./layers.js";
import { offerRuns } from "./runs.js";
import { partColor, remember, state } from "./state.js";
import { Waterfall } from "./waterfall.js";

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
const waterfall = new Waterfall();

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
    el("div", { class: "charts" }, layers.card, waterfall.card),
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
  if (!details) {
    status.textContent = run ? "This run has no traces of its steps (log.details)." : "Choose a run on the left.";
    return;
  }
  const [first, last] = answer.steps;
  kept = answer.kept ?? null;
  if (kept) Object.assign(slider, { min: 0, max: kept.length - 1, value: kept.indexOf(details.step) });
  else Object.assign(slider, { min: first, max: last, value: details.step });
  slider.setAttribute("aria-valuetext", `step ${details.step}`);
  status.textContent =
    `Step ${whole(details.step)} of ${whole(first)} to ${whole(last)}.` +
    (kept ? ` In this file: ${kept.map(whole).join(", ")}.` : "");
  if (!waterfall.card.hidden) waterfall.show(details.stages);
}
