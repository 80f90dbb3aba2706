// How the engine is: numbers, their course since the page was opened, and the last requests.

import { bar, spark, stages, timeline } from "./charts.js";

const KEPT = 120;
const SMOOTH = 5;
const $ = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const counted = (value) => (value < 1_000_000 ? whole.format(value) : short.format(value));
const rate = (value) => (value < 10 ? value.toFixed(1) : whole.format(value));

/** Seconds as people read them. */
export function seconds(value) {
  if (value < 0.9995) return `${whole.format(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${whole.format(value)} s`;
}

/** The value that a share of all are below; NaN of none. */
export function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : NaN;
}

/** What happened in each interval between two samples, a second. */
export function rates(samples, name) {
  return samples.slice(1).map((one, i) => {
    const took = one.up_s - samples[i].up_s;
    return took > 0 ? (one[name] - samples[i][name]) / took : 0;
  });
}

export class Board {
  #samples = [];
  #seen = [];
  #picked = null;
  #last = null;

  constructor() {
    const line = $("line");
    line.addEventListener("pointermove", (event) => this.#point(event));
    line.addEventListener("pointerdown", (event) => this.#point(event));
    line.addEventListener("pointerleave", () => this.#pick(null));
    line.addEventListener("blur", () => this.#pick(null));
    line.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.#line()).observe(line);
  }

  /** Take what the server says of itself now. */
  show(stats) {
    const before = this.#samples.at(-1);
    if (before && stats.up_s < before.up_s) this.#samples = []; // another server
    const { up_s, tokens, prompt_tokens, seats_used, waiting } = stats;
    this.#samples = [...this.#samples, { up_s, tokens, prompt_tokens, seats_used, waiting }].slice(-KEPT);
    this.#last = stats;
    this.#rates();
    this.#first(stats.last);
    this.#load(stats);
    this.#pages(stats);
    this.#line();
  }

  #rates() {
    const recent = this.#samples.slice(-SMOOTH - 1);
    const [from, to] = [recent[0], recent.at(-1)];
    const took = to.up_s - from.up_s || 1;
    const read = (to.prompt_tokens - from.prompt_tokens) / took;
    tile("rate", rate((to.tokens - from.tokens) / took), `${rate(read)} of prompts`, rates(this.#samples, "tokens"));
  }

  #first(last) {
    const waits = last.filter((one) => one.first_s !== null).map((one) => one.first_s - one.asked_s);
    if (!waits.length) return tile("first", "–", "", []);
    tile("first", seconds(quantile(waits, 0.5)), `95 %: ${seconds(quantile(waits, 0.95))}`, waits);
  }

  #load(stats) {
    const used = this.#samples.map((one) => one.seats_used);
    const of = document.createElement("small");
    of.textContent = ` of ${whole.format(stats.seats)}`;
    tile("seats", whole.format(stats.seats_used), `${counted(stats.requests)} requests so far`, used, stats.seats);
    $("tile-seats").querySelector(".value").append(of);
    const waiting = this.#samples.map((one) => one.waiting);
    tile("queue", whole.format(stats.waiting), `${whole.format(stats.inside)} in the server`, waiting, 4);
  }

  #pages({ pages, prefix_hit_tokens: hits, prompt_tokens: read, preemptions, drafted, accepted }) {
    const whole = pages.used + pages.cached + pages.free;
    bar($("tile-pages").querySelector(".bar"), ["used", "cached", "free"].map((name) => [name, pages[name]]));
    for (const name of ["used", "cached", "free"]) $(`pages-${name}`).textContent = whole ? counted(pages[name]) : "–";
    const share = read ? `${Math.min(100, Math.round((100 * hits) / read))} % of prompts` : "tokens of prompts";
    tile("hits", counted(hits), share);
    tile("preemptions", counted(preemptions), "since it started");
    $("tile-drafts").hidden = !drafted;
    tile("drafts", `${drafted ? Math.round((100 * accepted) / drafted) : 0} %`, `${counted(accepted)} guesses right`);
  }

  #line() {
    const line = $("line");
    if (!this.#last || !line.clientWidth) return;
    const options = { width: line.clientWidth, picked: this.#picked };
    this.#seen = timeline(line.firstElementChild, this.#last.last, this.#last.up_s, options);
    this.#tell();
  }

  #point(event) {
    const group = event.target.closest?.("[data-number]");
    this.#pick(group ? Number(group.dataset.number) : null);
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape") this.#pick(null);
    if (!by || !this.#seen.length) return;
    event.preventDefault();
    const at = this.#seen.findIndex((one) => one.number === this.#picked);
    const next = at < 0 ? this.#seen.length - 1 : at + by;
    this.#pick(this.#seen[Math.max(0, Math.min(this.#seen.length - 1, next))].number);
  }

  #pick(number) {
    if (number === this.#picked) return;
    this.#picked = number;
    for (const group of $("line").querySelectorAll("[data-number]")) {
      group.classList.toggle("picked", Number(group.dataset.number) === number);
    }
    this.#tell();
  }

  #tell() {
    const one = this.#seen.find((each) => each.number === this.#picked);
    const text = one ? told(one, this.#last.up_s) : "";
    if ($("tip").textContent !== text) $("tip").textContent = text;
  }
}

const ENDS = { stop: "ended", length: "at its most tokens", cancelled: "given up", error: "failed" };

/** A request in numbers. */
export function told(one, now) {
  const parts = [`#${one.number}`];
  for (const [name, from, to] of stages(one, now)) {
    if (name === "waits" && one.seated_s !== null) parts.push(`waited ${seconds(to - from)}`);
    if (name === "reads" && to > from) {
      const [verb, word] = one.first_s === null && one.end === null ? ["reads", "for"] : ["read", "in"];
      parts.push(`${verb} ${whole.format(one.prompt_tokens)} tokens ${word} ${seconds(to - from)}`);
    }
    if (name === "says" && one.first_s !== null) {
      const speed = one.tokens > 1 && to > from ? ` (${rate((one.tokens - 1) / (to - from))} a second)` : "";
      parts.push(`said ${whole.format(one.tokens)} in ${seconds(to - from)}${speed}`);
    }
  }
  if (one.seated_s === null && one.first_s === null) parts.push(`asked ${seconds(now - one.asked_s)} ago`);
  parts.push(one.end === null ? "goes on" : ENDS[one.end]);
  return parts.join(" · ");
}

function tile(name, value, sub, values, most) {
  const box = $(`tile-${name}`);
  box.querySelector(".value").textContent = value;
  box.querySelector(".sub").textContent = sub;
  if (values) spark(box.querySelector(".spark"), values, { most });
}
