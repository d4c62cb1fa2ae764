// The list of runs: which are there, how far they are, and which of them are shown.
import { byId, duration, el } from "./dom.js";
import { runColor, state } from "./state.js";

const QUIET_S = 60;

function progress(run) {
  if (run.step === null || run.step === undefined) return "no steps yet";
  const steps = `step ${run.step.toLocaleString("en-US")}${run.steps ? ` of ${run.steps.toLocaleString("en-US")}` : ""}`;
  if (run.steps && run.step >= run.steps) return `${steps}, finished`;
  const quiet = run.age > Math.max(QUIET_S, 5 * (run.step_seconds ?? 0));
  if (quiet) return `${steps}, silent for ${duration(run.age)}`;
  const left = run.steps && run.step_seconds ? `, ${duration((run.steps - run.step) * run.step_seconds)} left` : "";
  return `${steps}${left}`;
}

function isLive(run) {
  return !(run.steps && run.step >= run.steps) && run.age !== null && run.age <= Math.max(QUIET_S, 5 * (run.step_seconds ?? 0));
}

export function showRuns(choose) {
  const wanted = byId("find-run").value.toLowerCase();
  const list = byId("runs");
  const focused = document.activeElement?.dataset?.run;
  const runs = [...state.runs.values()].filter(run => run.run.toLowerCase().includes(wanted));
  byId("count").textContent = `${state.open.length} of ${state.runs.size}`;
  list.replaceChildren(...runs.map(run => {
    const isOpen = state.open.includes(run.run), reading = state.numbers.get(run.run);
    const box = el("input", { type: "checkbox", checked: isOpen, "data-run": run.run, onchange: event => choose(run.run, event.target.checked) });
    const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : 0;
    return el("li", {},
      el("label", { class: isOpen ? "run open" : "run", title: run.folder, style: { "--run": isOpen ? `var(${runColor(run.run)})` : "var(--faint)" } },
        box,
        el("span", { class: "name" }, run.run, isLive(run) && el("i", { class: "live", title: "being written" })),
        el("span", { class: "soft" }, progress(run)),
        el("span", { class: "track" }, el("span", { style: { width: `${100 * share}%` } })),
        reading && reading.read < 1 && el("span", { class: "soft" }, `reading, ${Math.floor(100 * reading.read)} %: curves are coarse until then`),
        reading && reading.damaged > 0 && el("span", { class: "bad" }, `${reading.damaged} damaged lines are left out`)),
      state.runs.size > 1 && el("button", { type: "button", class: "only", "aria-label": `Show only ${run.run}`, onclick: () => choose(run.run, true, true) }, "only"));
  }));
  if (focused) list.querySelector(`input[data-run="${CSS.escape(focused)}"]`)?.focus();
}
