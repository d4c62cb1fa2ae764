// A card with a picture that is read mark by mark, with the pointer or the keyboard: stages, times.
import { el } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

export class Frame {
  // title, unit: the head. tall: height of the picture in pixels. hint: what the keys do, for those who hear the page.
  constructor({ title, unit = "", tall = 150, hint = "" }) {
    this.clear();
    this.current = -1;
    this.hint = hint;
    this.title = el("h3", {}, title, " ", unit && el("em", {}, unit));
    this.tools = el("span", { class: "frame-tools" });
    this.above = el("div", { class: "y" });
    this.below = el("div", { class: "x" });
    this.cursor = el("i", { class: "cursor", hidden: true });
    this.area = el("div", { class: "picture", style: { height: `${tall}px` } });
    this.legend = el("div", { class: "legend" });
    this.card = el(
      "article",
      {
        class: "chart frame card",
        tabindex: 0,
        role: "group",
        "aria-label": title,
        onkeydown: event => this.press(event),
        onblur: () => this.mark(-1),
      },
      el("header", {}, this.title, this.tools),
      el("div", { class: "axes" }, this.above, this.area, this.below),
      this.legend,
    );
    this.area.addEventListener("pointermove", event => this.mark(this.under(event)));
    this.area.addEventListener("pointerleave", () => this.mark(-1));
    this.area.addEventListener("click", event => {
      const at = this.under(event);
      if (at >= 0) this.pick(at);
    });
  }

  // words: what the picture shows, in a sentence. picture: an element. count: how many marks it has.
  // box(at): left, top, width and height of a mark in shares of the picture. say(at): what the box beside it says.
  // pick(at): what a click does.
  show({ words, picture, count, box, say, pick = () => {}, under }) {
    this.card.setAttribute("aria-label", `${this.title.textContent.trim()}. ${words} ${this.hint}`.trim());
    Object.assign(this, { count, box, say, pick, find: under });
    this.area.replaceChildren(picture, this.cursor);
    if (this.current >= count) this.mark(-1);
  }

  // Nothing can be read.
  clear() {
    this.count = 0;
    this.find = () => -1;
  }

  labels(x, y = []) {
    this.below.replaceChildren(...x.map(text => el("span", {}, text)));
    this.above.replaceChildren(...y.map(text => el("span", {}, text)));
  }

  under(event) {
    const frame = this.area.getBoundingClientRect();
    const at = this.find((event.clientX - frame.left) / frame.width, (event.clientY - frame.top) / frame.height);
    return at >= 0 && at < this.count ? at : -1;
  }

  mark(at) {
    this.current = at;
    this.cursor.hidden = at < 0;
    if (at < 0) return hideTip();
    const [left, top, width, height] = this.box(at),
      place = { left, top, width, height };
    for (const [name, share] of Object.entries(place)) this.cursor.style.setProperty(name, `${100 * share}%`);
    const shown = this.cursor.getBoundingClientRect();
    showTip(shown.right, shown.top, this.say(at));
  }

  press(event) {
    if (event.target !== this.card || !this.count || event.ctrlKey || event.metaKey) return;
    const by = event.shiftKey ? 10 : 1,
      at = this.current;
    const to = {
      ArrowLeft: at - by,
      ArrowRight: at + by,
      ArrowUp: at - by,
      ArrowDown: at + by,
      Home: 0,
      End: this.count - 1,
      Escape: -1,
      Enter: at,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (event.key === "Enter") {
      if (at >= 0) this.pick(at);
    } else if (event.key === "Escape") this.mark(-1);
    else this.mark(Math.max(0, Math.min(this.count - 1, to)));
  }
}
