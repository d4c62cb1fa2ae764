// The page: what is chosen, and a question to the server every second for what is new.
import { drawCharts, findCharts, layOut, printCharts, redrawCharts, useCharts } from "./charts.js";
import { ask, byId } from "./dom.js";
import { frozen } from "./frozen.js";
import { showAlarms, showOverview } from "./overview.js";
import { foundRuns, showRuns } from "./runs.js";
import { showSamples, startSamples } from "./samples.js";
import { showSettings } from "./settings.js";
import { archive, archived, recall, remember, state, teamOf } from "./state.js";
import { showStep, startStep } from "./step.js";

// More curves than these cannot be told apart.
const MOST_OPEN = 40;
const EVERY_MS = 800,
  WHILE_READING_MS = 50;
let span = [0, 1],
  seen = "",
  isFirst = true,
  shown = "",
  compared = [],
  timer = 0,
  polling = false;

function show() {
  remember();
  shown = state.open.join();
  for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== state.view;
  for (const button of document.querySelectorAll("[data-view]"))
    button.setAttribute("aria-current", String(button.dataset.view === state.view));
  byId("tools").hidden = state.view !== "curves";
  // It keeps its place: what stands below must not move when a reader zooms.
  byId("reset").style.visibility = state.range ? "visible" : "hidden";
  byId("axis").value = state.axis;
  byId("window").value = state.window;
  if (byId("find-chart").value !== state.chart) byId("find-chart").value = state.chart;
  showRuns(acts);
  if (state.view === "samples") showSamples();
  if (state.view === "settings") showSettings();
  showDetails();
}

function showDetails() {
  if (state.view === "step") showStep();
}

function view(name) {
  state.view = name;
  show();
  if (name === "curves") drawCharts();
}

async function showNumbers() {
  const open = [...state.open];
  state.alarms = open.length ? await ask("alarms", { run: open }) : [];
  if (open.join() !== compared.join()) ({ settings: state.settings } = await ask("settings", { run: open }));
  compared = open;
  const groups = open.map(run => state.runs.get(run)?.group).filter(Boolean);
  byId("grouped").parentElement.hidden = groups.length === new Set(groups).size;
  byId("grouped").checked = state.grouped !== "";
  await layOut();
  showOverview(() => view("settings"));
  showAlarms(state.range ?? span, zoom, true);
  await drawCharts();
}

function zoom(range) {
  state.range = range && range[0] < range[1] ? range : null;
  show();
  showAlarms(state.range ?? span, zoom);
  drawCharts();
}

// The baseline is the first, and it stays while others come and go.
function choose(runs) {
  state.open = [...new Set([...(runs.length && state.base ? [state.base] : []), ...runs])].slice(0, MOST_OPEN);
  state.range = null;
  seen = "";
  show();
  poll();
}

// What a reader may do with a run of the list.
const acts = {
  open: (run, isOpen) => {
    if (run === state.base) state.base = "";
    choose(isOpen ? [...state.open, run] : state.open.filter(other => other !== run));
  },
  only: run => choose([run]),
  pin: run => {
    state.base = state.base === run ? "" : run;
    choose(state.open);
  },
  archive: run => {
    archive(state.runs.get(run));
    acts.open(run, false);
  },
};

async function poll() {
  clearTimeout(timer);
  if (polling) {
    timer = setTimeout(poll, WHILE_READING_MS);
    return;
  }
  polling = true;
  let wait = EVERY_MS;
  try {
    const answer = await ask("runs", { run: state.open });
    byId("connection").textContent = "";
    state.runs = new Map(answer.runs.map(run => [run.run, run]));
    state.folders = answer.folders ?? [];
    state.numbers = new Map(answer.open.map(run => [run.run, run]));
    const there = state.open.filter(run => state.runs.has(run));
    if (there.length !== state.open.length) {
      state.open = there;
      remember();
    }
    if (!there.includes(state.base)) state.base = "";
    const newest = [...state.runs.values()].filter(run => !archived.has(run.folder));
    if (!state.open.length && isFirst && newest.length) {
      // The run that was written last.
      state.open = [newest.sort((a, b) => (a.age ?? Infinity) - (b.age ?? Infinity))[0].run];
      wait = 0;
    }
    isFirst = false;
    showRuns(acts);
    const news = answer.open.map(run => [run.run, teamOf(run.run), run.version, run.details]),
      now = JSON.stringify([state.open, news]);
    if (now !== seen && wait) {
      await showNumbers();
      seen = now;
      // The other views are drawn again for other runs only: what a reader has opened there stays open.
      if (shown !== state.open.join()) show();
      else showDetails();
    }
    if (answer.open.some(run => run.read < 1)) wait = WHILE_READING_MS;
  } catch (error) {
    byId("connection").textContent =
      error instanceof TypeError ? "The server does not answer: is hybrid-grpo watch still running?" : error.message;
  } finally {
    polling = false;
    clearTimeout(timer);
    // Nothing new comes to a frozen page.
    if (!frozen || !wait) timer = setTimeout(poll, document.hidden ? 10 * EVERY_MS : wait);
  }
}

const THEMES = ["", "light", "dark"],
  THEME_NAMES = { "": "System colors", light: "Light", dark: "Dark" };
function showTheme() {
  byId("theme").textContent = THEME_NAMES[document.documentElement.dataset.theme ?? ""];
}
byId("theme").addEventListener("click", () => {
  const now = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
  if (now) document.documentElement.dataset.theme = now;
  else delete document.documentElement.dataset.theme;
  rememberChoice("theme", now);
  showTheme();
  redrawCharts();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

for (const button of document.querySelectorAll("[data-view]"))
  button.addEventListener("click", () => view(button.dataset.view));
for (const name of ["axis", "window"])
  byId(name).addEventListener("change", event => {
    state[name] = event.target.value;
    zoom(name === "axis" ? null : state.range);
  });
byId("reset").addEventListener("click", () => zoom(null));
byId("grouped").addEventListener("change", event => {
  state.grouped = event.target.checked ? "1" : "";
  choose(state.open);
});
byId("find-run").addEventListener("input", () => showRuns(acts));
byId("sort-runs").addEventListener("change", () => showRuns(acts));
byId("all-runs").addEventListener("click", () => choose(foundRuns().map(run => run.run)));
byId("no-runs").addEventListener("click", () => choose([]));
byId("find-chart").addEventListener("input", event => {
  state.chart = event.target.value;
  remember();
  findCharts();
});
byId("link").addEventListener("click", async event => {
  const button = event.currentTarget,
    label = button.textContent;
  // Without a clipboard the address bar has it all the same.
  const copied = await navigator.clipboard?.writeText(location.href).then(
    () => true,
    () => false,
  );
  button.textContent = copied ? "Copied" : "It is in the address bar";
  setTimeout(() => (button.textContent = label), 1500);
});
byId("print").addEventListener("click", printCharts);
addEventListener("keydown", event => {
  if ((event.ctrlKey || event.metaKey) && event.key === "p" && state.view === "curves") {
    event.preventDefault();
    printCharts();
  }
});
byId("tools").addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", () => {
  recall();
  show();
  findCharts();
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});

useCharts(zoom, ends => {
  if (ends.join() === span.join()) return;
  span = ends;
  showAlarms(state.range ?? span, zoom, true);
});
if (frozen) {
  byId("written").textContent = frozen.written;
  // There are points for what the page smooths by itself, and for no other width.
  for (const option of document.querySelectorAll("option.live-only")) option.remove();
}
if (innerWidth < 860) byId("chooser").open = false;
startSamples();
startStep();
recall();
showTheme();
show();
poll();
