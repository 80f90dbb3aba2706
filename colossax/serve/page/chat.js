// What is asked and said: a chat, or a text that the model goes on with.

import { Trouble, said } from "./api.js";
import { seconds } from "./board.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const MOST_OF_TEXT = 128;
const NEAR_PX = 48;

export class Chat {
  #facts = null;
  #most = null;
  #turns = [];
  #stopper = null;
  #wantsKey;

  /** `wantsKey` is called when the server asks for a key. */
  constructor(wantsKey) {
    this.#wantsKey = wantsKey;
    const ask = $("ask");
    ask.addEventListener("input", grow);
    ask.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.#clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#stopper) this.stop();
    });
  }

  /** Take what does not change of the server: its models, and whether they chat. */
  knows(stats) {
    if (this.#facts?.model === stats.model && this.#facts.chat === stats.chat) return;
    this.#facts = { model: stats.model, chat: stats.chat };
    this.#most = stats.chat ? null : Math.min(MOST_OF_TEXT, Math.floor(stats.slots / 2));
    $("max_tokens").placeholder = this.#most ?? "as many as fit";
    $("chat-title").textContent = stats.chat ? "Chat" : "Text";
    $("view-chat").textContent = stats.chat ? "Chat" : "Text";
    $("ask-label").textContent = stats.chat ? "Message" : "Text to go on with";
    $("ask").placeholder = stats.chat ? `Message ${stats.model}` : "A text to go on with";
    $("lead").textContent = stats.chat ? "What would you like to ask?" : "Begin a text; the model goes on with it.";
    $("system-field").hidden = !stats.chat;
    $("model-field").hidden = stats.models.length < 2;
    const options = stats.models.map((name) => new Option(name, name));
    $("set-model").replaceChildren(...options);
  }

  /** End what is being said; the server hears of it by the connection. */
  stop() {
    this.#stopper?.abort();
    $("ask").focus();
  }

  async #send() {
    const text = $("ask").value;
    if (this.#stopper || !text.trim()) return;
    const settings = this.#settings();
    if (!settings) return;
    $("ask").value = "";
    grow();
    await this.#ask(text, settings);
  }

  async #ask(text, settings) {
    const chat = this.#facts?.chat ?? true;
    const [turn, turns] = [new Turn(text, chat), this.#turns];
    $("empty").hidden = true;
    $("log").append(turn.box);
    $("log").scrollTop = $("log").scrollHeight;
    this.#busy(true);
    $("ask").focus();
    const [path, body] = chat
      ? ["v1/chat/completions", { messages: this.#messages(text) }]
      : ["v1/completions", { prompt: text }];
    try {
      if (!this.#facts) throw new Trouble("The server has not said yet which model it has.");
      for await (const piece of said(path, { ...body, ...settings }, this.#stopper.signal)) {
        following(() => turn.add(piece));
      }
      following(() => turn.end(turn.finish === "length" ? "at its most tokens" : ""));
      announce("The answer is whole.");
    } catch (problem) {
      following(() => this.#failed(turn, text, problem));
    } finally {
      this.#busy(false);
    }
    if (turn.said) {
      turns.push(turn); // which is not of what is shown, where that was cleared meanwhile
      if (!chat) turn.offer("Go on", () => this.#goOn(turn));
    }
  }

  #goOn(turn) {
    const settings = this.#stopper ? null : this.#settings();
    if (settings) this.#ask(turn.asked + turn.said, settings);
  }

  #failed(turn, text, problem) {
    if (problem.name === "AbortError") {
      turn.end("stopped");
      announce("Stopped.");
    } else {
      turn.fail(problem instanceof Trouble ? problem.message : `This page failed: ${problem.message}`);
      if (problem.status === 401) this.#wantsKey(problem.message);
    }
    if (!turn.said && !$("ask").value && turn.box.isConnected) {
      $("ask").value = text; // to be sent again: nothing came of it
      grow();
    }
  }

  #messages(text) {
    const system = $("system").value.trim();
    const found = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.#turns) {
      found.push({ role: "user", content: turn.asked }, { role: "assistant", content: turn.said });
    }
    return [...found, { role: "user", content: text }];
  }

  /** What was set, or null where a field has what is no such number. */
  #settings() {
    const found = { model: $("set-model").value || this.#facts?.model };
    for (const name of NUMBERS) {
      const field = $(name);
      if (!field.checkValidity()) {
        $("settings").open = true;
        field.reportValidity();
        return null;
      }
      if (field.value !== "") found[name] = field.valueAsNumber;
    }
    // A chat may go on until it ends; a text has no end of its own, and the server stops it early.
    if (this.#most) found.max_tokens ??= this.#most;
    return found;
  }

  #busy(now) {
    const onButton = document.activeElement === $("stop") || document.activeElement === $("send");
    this.#stopper = now ? new AbortController() : null;
    $("log").setAttribute("aria-busy", String(now));
    $("send").hidden = now;
    $("stop").hidden = !now;
    if (onButton) $("ask").focus();
  }

  #clear() {
    this.#stopper?.abort();
    this.#turns = [];
    for (const box of $("log").querySelectorAll(".turn")) box.remove();
    $("empty").hidden = false;
    announce("Cleared.", true);
    $("ask").focus();
  }
}

/** What was asked and what was said to it; only ever text. */
class Turn {
  said = "";
  finish = null;
  #usage = null;
  #began = performance.now();
  #first = null;

  constructor(asked, chat) {
    this.asked = asked;
    this.box = made("article", chat ? "turn" : "turn passage");
    const question = made("p", "asked", asked);
    question.prepend(made("span", "hidden", chat ? "You: " : "Given: "));
    this.answer = made("p", "answer waits");
    this.answer.append(made("span", "hidden", chat ? "Model: " : "Goes on: "));
    this.text = document.createTextNode("");
    this.answer.append(this.text);
    this.foot = made("p", "foot");
    this.box.append(question, this.answer, this.foot);
  }

  add({ text, finish, usage }) {
    if (text) {
      this.#first ??= performance.now();
      this.said += text;
      this.text.appendData(text);
      this.answer.classList.remove("waits");
    }
    this.finish = finish ?? this.finish;
    this.#usage = usage ?? this.#usage;
  }

  end(note) {
    const parts = note ? [note] : [];
    if (this.#usage) parts.push(...this.#speed());
    this.#close(parts.join(" · "));
  }

  fail(sentence) {
    const trouble = made("p", "trouble", sentence);
    trouble.setAttribute("role", "alert");
    this.box.insertBefore(trouble, this.foot);
    this.#close("");
  }

  offer(name, act) {
    const button = made("button", "quiet", name);
    button.type = "button";
    button.addEventListener("click", act);
    this.foot.append(button);
  }

  #speed() {
    const count = this.#usage.completion_tokens;
    const found = [`${count} ${count === 1 ? "token" : "tokens"}`];
    if (this.#first === null) return found;
    const took = (performance.now() - this.#first) / 1000;
    if (count > 1 && took > 0) found.push(`${((count - 1) / took).toFixed(1)} a second`);
    found.push(`first after ${seconds((this.#first - this.#began) / 1000)}`);
    return found;
  }

  #close(text) {
    this.answer.classList.remove("waits");
    this.answer.hidden = !this.said;
    if (text) this.foot.append(made("span", "numbers", text));
    if (this.said) this.offer("Copy", () => copy(this.said));
  }
}

/** Change the log, and stay at its end if that was in sight. */
function following(change) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied.", true);
  } catch {
    announce(byHand(text) ? "Copied." : "The browser does not let this page copy.", true);
  }
}

/** Where a page from another machine, without TLS, has no clipboard. */
function byHand(text) {
  const field = made("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  $("ask").focus();
  return done;
}

/** Say something to those who listen, and perhaps to those who look. */
function announce(text, shown = false) {
  const said = $("said");
  said.textContent = text;
  said.classList.toggle("hidden", !shown);
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => said.classList.add("hidden"), 4000);
}

function grow() {
  const ask = $("ask");
  ask.style.height = "auto";
  ask.style.height = `${ask.scrollHeight + 2}px`;
}

function made(name, kind, text) {
  const one = document.createElement(name);
  one.className = kind;
  if (text !== undefined) one.textContent = text;
  return one;
}
