// Elements, numbers as people read them, and questions to the server.
import { answer as inside, frozen } from "./frozen.js";

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => element.style.setProperty(key, text));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = id => document.getElementById(id);

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  // What is smaller is left of rounding.
  const size = Math.abs(value) < 1e-12 ? 0 : Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number.isInteger(size) ? String(Math.round(value)) : value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

// With two digits, where these say something.
export function rounded(value) {
  if (value === null) return "none";
  return value !== 0 && (Math.abs(value) < 0.005 || Math.abs(value) >= 1000) ? number(value) : value.toFixed(2);
}

export function tick(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  if (size >= 1e9) return `${+(value / 1e9).toFixed(2)}B`;
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  return size >= 1e4 ? `${+(value / 1e3).toFixed(1)}k` : String(+value.toPrecision(4));
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.round(hours / 24)} days`;
}

// A time within a step.
export const seconds = value => (value === 0 ? "0 s" : value < 1 ? `${Math.round(1000 * value)} ms` : duration(value));

export const whole = value => Math.round(value).toLocaleString("en-US");

export function place(axis, value) {
  if (axis === "hours") return `${value.toFixed(value < 10 ? 3 : 1)} h`;
  return axis === "step" ? `step ${whole(value)}` : `${whole(value)} tokens`;
}

// Lists in `parameters` are given several times; what is empty is left out. A frozen page asks itself.
export async function ask(question, parameters = {}) {
  if (frozen) return inside(question, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const item of Array.isArray(value) ? value : [value])
      if (item !== null && item !== undefined && item !== "") query.append(name, item);
  const response = await fetch(`api/${question}?${query}`);
  const answer = await response
    .json()
    .catch(() => ({ error: "The server has failed: see what it says where it was started." }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
