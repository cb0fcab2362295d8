// The live page: connects the feed with its parts.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Views, byId, el, setAttribute, setText, table } from "./dom.js";
import { Feed, problemOf } from "./feed.js";
import { clock, milliseconds, number, perSecond } from "./format.js";
import { Pools } from "./pools.js";
import { Requests } from "./requests.js";

const NOTICE_MS = 8000;
const STATUS_TEXTS = { connecting: "connecting", live: "live", lost: "connection lost, trying again", locked: "token needed", paused: "paused" };

// Keys

const bearer = (name) => {
  const token = sessionStorage.getItem(name);
  return token ? { authorization: `Bearer ${token}` } : {};
};

function askForKeys(problem = "") {
  setText(byId("access-problem"), problem);
  if (byId("access").open) return; // with what was typed so far
  byId("admin-token").value = sessionStorage.getItem("admin-token") ?? "";
  byId("api-key").value = sessionStorage.getItem("api-key") ?? "";
  byId("access").showModal();
}

byId("keys").addEventListener("click", () => askForKeys());
byId("access-close").addEventListener("click", () => byId("access").close());
byId("access").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const name of ["admin-token", "api-key"]) sessionStorage.setItem(name, byId(name).value.trim());
  byId("access").close();
  feed.reconnect();
});

// Notices

let noticeTimer;

function notify(text, isProblem = false) {
  clearTimeout(noticeTimer);
  byId("notice").classList.toggle("bad", isProblem);
  setText(byId("notice"), text);
  byId("notice").hidden = false;
  noticeTimer = setTimeout(() => { byId("notice").hidden = true; }, NOTICE_MS);
}

async function post(path, body, describe) {
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...bearer("admin-token") },
      body: JSON.stringify(body),
    });
    if (!response.ok) throw new Error((await problemOf(response)).message);
    notify(describe(await response.json()));
  } catch (error) {
    notify(error.message, true);
  }
}

const calls = {
  resize: (sizes) => post("pools/resize", sizes, (answer) => answer.changes.map((one) => `${one.pool}: ${one.from} → ${one.to}`).join(", ")),
  drain: (instance) => post("pools/drain", { instance }, (answer) => `${answer.instance} drains; ${answer.unfinished} requests run there. A local stack starts it again.`),
};

// Parts

const charts = new Charts(byId("charts"));
const pools = new Pools(byId("pools"), calls);
const requests = new Requests();
const chat = new Chat(() => bearer("api-key"), askForKeys);

const decisions = table([["at", "num"], ["pool", ""], ["size", "num"], ["why", "why"]], "No pool has been resized yet.");
byId("decisions").append(decisions.node);
const decisionRows = new Views(decisions.node, (key, one) => {
  const size = one.from === one.to ? `${one.to}` : `${one.from} → ${one.to}`;
  const why = [one.hold.replaceAll("_", " "), one.reason].filter(Boolean).join(": ") || `by the ${one.cause}`;
  const cells = [el("td", { class: "num" }, clock(one.at)), el("td", {}, one.pool), el("td", { class: "num" }, size), el("td", { class: "why" }, why)];
  return { node: el("tbody", { class: one.from === one.to ? "held" : "" }, el("tr", {}, ...cells)), update: () => {} };
});

const totals = new Views(byId("totals"), (key) => {
  const value = el("dd");
  return { node: el("div", {}, el("dt", {}, key), value), update: (text) => setText(value, text) };
});

function showTotals({ router, points }) {
  const last = points[Object.keys(points).at(-1)] ?? {};
  const failed = Object.entries(router.ended).filter(([outcome]) => outcome !== "finished" && outcome !== "aborted");
  const rejected = Object.values(router.rejected).reduce((sum, count) => sum + count, 0);
  totals.update([
    ["in flight", number(router.in_flight)],
    ["queued", number(router.queued)],
    ["tokens/s", perSecond(last.tokens_per_s)],
    ["TTFT p50", milliseconds(last.ttft_p50_ms)],
    ["ITL p50", milliseconds(last.itl_p50_ms)],
    ["received", number(router.received)],
    ["failed", number(failed.reduce((sum, [, count]) => sum + count, 0))],
    ["rejected", number(rejected)],
  ]);
}

function showHead(state) {
  setText(byId("model"), `${state.router.model} · ${state.router.version}`);
  document.title = `${state.router.model} – Tandem`;
  showTotals(state);
}

function showDecisions(state) {
  const made = Object.entries(state.decisions).sort(([, one], [, other]) => other.at - one.at);
  decisions.isEmpty(!made.length);
  decisionRows.update(made);
}

/** What shows a part of the state; each has a frame of its own, so that none is long. */
const PARTS = [showHead, ...charts.parts, ...pools.parts, ...requests.parts, (state) => chat.update(state), showDecisions];

function showStatus(status, detail) {
  const text = status === "live" && !latest?.router.serving ? "live, not serving" : status === "refused" ? `refused: ${detail}` : STATUS_TEXTS[status];
  setText(byId("status"), text);
  setAttribute(byId("status"), "data-state", text === "live, not serving" ? "lost" : status);
  setAttribute(byId("status"), "title", detail);
  document.body.classList.toggle("stale", status !== "live");
  if (status === "locked") askForKeys(sessionStorage.getItem("admin-token") ? "The router does not know this operators' token." : "This router needs an operators' token.");
}

let latest;
let isShowing = false;

async function show() {
  if (isShowing) return;
  isShowing = true;
  try {
    for (const part of PARTS) {
      await new Promise(requestAnimationFrame);
      part(latest);
    }
    showStatus("live", "");
  } finally {
    isShowing = false;
  }
}

const feed = new Feed((state) => {
  latest = state;
  show();
}, showStatus);

feed.run(() => bearer("admin-token"));
