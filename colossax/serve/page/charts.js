// Small pictures in SVG: a line of numbers, a bar of shares, a time line of requests.

const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG with attributes. */
export function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Numbers as a line with what is below it filled; the newest is at the right. */
export function spark(svg, values, { most = 0, room = 60 } = {}) {
  const [width, height] = [120, 28];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const shown = values.slice(-room);
  if (shown.length < 2) return svg.replaceChildren();
  const top = Math.max(most, ...shown) || 1;
  const x = (i) => width - ((shown.length - 1 - i) * width) / (room - 1);
  const y = (value) => height - 1.5 - (value / top) * (height - 3);
  const points = shown.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  svg.replaceChildren(
    shape("polygon", { points: `${x(0)},${height} ${points.join(" ")} ${width},${height}`, class: "area" }),
    shape("polyline", { points: points.join(" "), class: "stroke" }),
  );
}

/** Shares of a whole, side by side: `[[class, number], ...]`. */
export function bar(svg, shares) {
  const whole = shares.reduce((sum, [, value]) => sum + value, 0) || 1;
  svg.setAttribute("viewBox", "0 0 100 1");
  let at = 0;
  const parts = [];
  for (const [name, value] of shares) {
    const width = (100 * value) / whole;
    parts.push(shape("rect", { x: at, y: 0, width, height: 1, class: name }));
    at += width;
  }
  svg.replaceChildren(...parts);
}

const SPANS = [10, 20, 30, 60, 120, 300, 600, 1800, 3600];
const SHOWN = 12;
const LEAST = 120;

/** The stages of a request on the server's clock: `[class, from, to]`. */
export function stages(one, now) {
  const end = one.ended_s ?? now;
  const first = one.first_s ?? end;
  const seated = Math.min(one.seated_s ?? (one.first_s === null ? end : one.asked_s), first);
  return [
    ["waits", one.asked_s, seated],
    ["reads", seated, first],
    ["says", first, end],
  ];
}

/** Rows for requests so that none lies on another: the first row that is free. */
export function rows(requests, now) {
  const free = [];
  return requests.map((one) => {
    let row = free.findIndex((until) => until <= one.asked_s);
    if (row < 0) row = free.length;
    free[row] = (one.ended_s ?? now) + 1e-3;
    return row;
  });
}

/** Draw requests over time, now at the right; the span is what the newest of them need. */
export function timeline(svg, requests, now, { width, picked }) {
  const newest = requests.at(-SHOWN) ?? requests[0];
  const age = newest ? now - newest.asked_s : 0;
  const span = SPANS.find((one) => one >= age) ?? SPANS.at(-1);
  const from = now - span;
  const seen = requests.filter((one) => (one.ended_s ?? now) >= from);
  const placed = rows(seen, now);
  const count = Math.max(1, ...placed.map((row) => row + 1));
  const high = Math.max(3, Math.min(14, Math.floor(LEAST / count)));
  const height = Math.max(LEAST, count * high) + 20;
  const x = (at) => Math.max(0, ((at - from) / span) * width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const made = axis(span, width, height);
  seen.forEach((one, i) => {
    const group = shape("g", { "data-number": one.number, class: marks(one, picked) });
    const top = placed[i] * high;
    const [left, right] = [x(one.asked_s), x(one.ended_s ?? now)];
    group.append(shape("rect", { x: left, y: top, width: Math.max(4, right - left), height: high, class: "catch" }));
    for (const [name, start, end] of stages(one, now)) {
      if (end <= start && name !== "says") continue;
      const least = name === "says" ? 1.5 : 0;
      group.append(shape("rect", { x: x(start), y: top + 1, width: Math.max(least, x(end) - x(start)), height: Math.max(2, high - 3), rx: 1.5, class: name }));
    }
    made.push(group);
  });
  if (!seen.length) made.push(shape("text", { x: width / 2, y: LEAST / 2, class: "none" }, "No request yet"));
  svg.replaceChildren(...made);
  return seen;
}

function marks(one, picked) {
  const found = ["request"];
  if (one.end === "error") found.push("failed");
  if (one.end === null) found.push("runs");
  if (one.number === picked) found.push("picked");
  return found.join(" ");
}

function axis(span, width, height) {
  const made = [];
  const parts = width < 360 ? 2 : 4;
  for (let i = 0; i <= parts; i++) {
    const at = (i * width) / parts;
    made.push(shape("line", { x1: at, x2: at, y1: 0, y2: height - 18, class: "tick" }));
    const anchor = i === 0 ? "start" : i === parts ? "end" : "middle";
    const text = i === parts ? "now" : `${ago(span * (1 - i / parts))} ago`;
    made.push(shape("text", { x: at, y: height - 4, "text-anchor": anchor, class: "label" }, text));
  }
  return made;
}

const ago = (s) => (s >= 120 ? `${+(s / 60).toFixed(1)} min` : `${+s.toFixed(1)} s`);
