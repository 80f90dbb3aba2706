// Joins the chat and the board to a server, and asks for a key where it wants one.

import { key, stats } from "./api.js";
import { Board } from "./board.js";
import { Chat } from "./chat.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const GONE_MS = 3000;

const board = new Board();
const chat = new Chat(wantKey);
let timer = 0;
let polls = 0;

async function poll() {
  clearTimeout(timer);
  const mine = ++polls;
  let next = POLL_MS;
  try {
    const found = await stats();
    if (mine !== polls) return; // another one goes on
    $("door").hidden = true;
    chat.knows(found);
    board.show(found);
    $("model").textContent = found.model;
    state(...running(found));
  } catch (problem) {
    if (mine !== polls) return;
    if (problem.status === 401) return wantKey(key.get() ? problem.message : "");
    state("gone", problem.status ? problem.message : "No answer");
    next = Math.max(GONE_MS, 1000 * (problem.afterS ?? 0));
  }
  timer = setTimeout(poll, next);
}

function running(found) {
  if (found.draining) return ["waiting", "Ending"];
  if (!found.ready) return ["waiting", "Not ready yet"];
  return ["well", "Ready"];
}

function state(name, text) {
  $("state").dataset.state = name;
  $("board").dataset.state = name;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
}

/** Ask for a key, and say why the one there was will not do. */
function wantKey(why) {
  clearTimeout(timer);
  state("gone", "A key is needed");
  if (why) $("door-said").textContent = why;
  if (!$("door").hidden) return;
  $("door").hidden = false;
  $("key").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  $("door").hidden = true;
  $("ask").focus();
  poll();
});

function view(name) {
  document.body.dataset.view = name;
  for (const one of ["chat", "board"]) $(`view-${one}`).setAttribute("aria-pressed", String(one === name));
}

$("view-chat").addEventListener("click", () => view("chat"));
$("view-board").addEventListener("click", () => view("board"));

// A page that nobody sees asks nothing.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && $("door").hidden) poll();
});

$("ask").focus();
poll();
