// Settings that differ between the runs shown, and all settings of each.
import { ask, byId, el } from "./dom.js";
import { runColor, state } from "./state.js";

export async function showSettings() {
  const runs = [...state.open],
    box = byId("settings");
  if (!runs.length) {
    box.replaceChildren(el("p", { class: "empty" }, "Choose a run on the left."));
    return;
  }
  const { differing, texts } = await ask("settings", { run: runs });
  if (runs.join() !== state.open.join()) return;
  const name = run => [el("span", { class: "dot", style: { background: `var(${runColor(run)})` } }), run];
  const table = el(
    "div",
    { class: "scroll card", tabindex: 0, role: "group", "aria-label": "Settings that differ" },
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
        ),
      ),
      el(
        "tbody",
        {},
        ...differing.map(entry =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, entry.name),
            ...runs.map(run => el("td", {}, entry.values[run] ?? el("span", { class: "soft" }, "not set"))),
          ),
        ),
      ),
    ),
  );
  const alike = el("p", { class: "calm" }, "All settings of these runs are the same.");
  box.replaceChildren(
    ...(runs.length > 1 ? [el("h2", {}, "Settings that differ"), differing.length ? table : alike] : []),
    el("h2", {}, "All settings"),
    ...runs.map(run =>
      el(
        "details",
        { class: "card config", open: runs.length === 1 },
        el("summary", {}, ...name(run)),
        el("pre", { tabindex: 0 }, texts[run] || "This folder has no config.yaml."),
      ),
    ),
  );
}
