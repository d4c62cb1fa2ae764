// The box that says what is under the pointer or at the keyboard's place. The page has one.
import { el } from "./dom.js";

const AWAY = 14;
const tip = el("div", { class: "tip", role: "status", hidden: true });
document.body.append(tip);

// x, top: a place in the window, in pixels. The box stands beside x, on the side that has room.
export function showTip(x, top, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const size = tip.getBoundingClientRect(),
    left = x + AWAY;
  tip.style.left = `${Math.max(4, left + size.width > innerWidth - 4 ? x - AWAY - size.width : left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - size.height - 4, top))}px`;
}

export function hideTip() {
  tip.hidden = true;
}

// A table of names and values under a head.
export function facts(head, entries) {
  return el(
    "table",
    {},
    el("tr", {}, el("th", { colspan: 2, class: "tip-head" }, head)),
    ...entries.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, ...[name].flat()), el("td", {}, value))),
  );
}
