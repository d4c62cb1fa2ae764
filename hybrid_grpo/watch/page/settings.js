// The settings of the runs shown: which differ, which were changed from the default, and all of them.
import { ask, byId, el } from "./dom.js";
import { runColor, state } from "./state.js";

const KINDS = { differ: "that differ", changed: "changed from the default", all: "all" };
let kind = null;
const words = el("input", { type: "search", placeholder: "Name or value", "aria-label": "Find a setting" });
const kinds = el("select", {}, ...Object.entries(KINDS).map(([name, label]) => el("option", { value: name }, label)));

export async function showSettings() {
  const runs = [...state.open],
    box = byId("settings");
  if (!runs.length) {
    box.replaceChildren(el("p", { class: "empty" }, "Choose a run on the left."));
    return;
  }
  const [{ settings, texts }, ...printed] = await Promise.all([
    ask("settings", { run: runs }),
    ...runs.map(run => ask("console", { run })),
  ]);
  if (runs.join() !== state.open.join()) return;
  const name = run => [el("span", { class: "dot", style: { background: `var(${runColor(run)})` } }), run];
  const table = el("div", { class: "scroll card", tabindex: 0, role: "group", "aria-label": "Settings" }),
    count = el("p", { class: "calm", role: "status" });
  kinds.querySelector("[value=differ]").hidden = runs.length < 2;
  kinds.value = kind && (kind !== "differ" || runs.length > 1) ? kind : runs.length > 1 ? "differ" : "changed";

  function fill() {
    const wanted = words.value.toLowerCase().trim();
    const found = settings.filter(
      entry =>
        (kinds.value === "all" || entry[kinds.value]) &&
        [entry.name, ...Object.values(entry.values)].some(text => (text ?? "").toLowerCase().includes(wanted)),
    );
    count.textContent = found.length
      ? `${found.length} of ${settings.length} settings, the most important first. Bold: not the default.`
      : kinds.value === "differ" && !wanted
        ? "All settings of these runs are the same."
        : "No setting is found.";
    table.hidden = !found.length;
    table.replaceChildren(
      el(
        "table",
        { class: "numbers settings" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col" }, "Setting"),
            ...runs.map(run => el("th", { scope: "col" }, ...name(run))),
            el("th", { scope: "col" }, "Default"),
          ),
        ),
        el("tbody", {}, ...found.map(entry => line(entry, runs))),
      ),
    );
  }
  words.oninput = fill;
  kinds.onchange = () => {
    kind = kinds.value;
    fill();
  };
  fill();
  box.replaceChildren(
    el(
      "form",
      { class: "tools search", onsubmit: event => event.preventDefault() },
      el("label", {}, "Settings", kinds),
      words,
    ),
    count,
    table,
    el("h2", {}, "config.yaml"),
    ...runs.map(run => fold(name(run), texts[run] || "This folder has no config.yaml.")),
    ...(printed.some(lines => lines.length) ? [el("h2", {}, "Last lines of the console")] : []),
    ...runs.flatMap((run, at) => (printed[at].length ? [fold(name(run), printed[at].join("\n"))] : [])),
  );
}

const fold = (title, text) =>
  el("details", { class: "card config" }, el("summary", {}, ...title), el("pre", { tabindex: 0 }, text));

function line(entry, runs) {
  const cell = value =>
    value === null || value === undefined
      ? el("td", {}, el("span", { class: "soft" }, "not set"))
      : el("td", {}, entry.default !== null && value !== entry.default ? el("b", {}, value) : value);
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, entry.name),
    ...runs.map(run => cell(entry.values[run])),
    el("td", { class: "soft" }, entry.default ?? "–"),
  );
}
