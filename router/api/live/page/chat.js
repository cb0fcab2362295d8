// A chat with the served model, and which instances have answered.

import { byId, el } from "./dom.js";
import { events, problemOf } from "./feed.js";
import { milliseconds, perSecond } from "./format.js";
import { stageBar } from "./requests.js";

const LOOKED_UP_MS = 5000;

export class Chat {
  #log = byId("chat-log");
  #text = byId("chat-text");
  #send = byId("chat-send");
  #messages = [];
  #abort;
  #awaited = new Map(); // request id → the note that gets its route and times
  #hasChat = true;

  /** `headers()` carries the API key; `onLocked()` asks for one. */
  constructor(headers, onLocked) {
    this.headers = headers;
    this.onLocked = onLocked;
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    byId("chat-new").addEventListener("click", () => this.#clear());
    this.#text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.#submit(); }
    });
    this.#clear();
  }

  update(state) {
    this.#hasChat = state.router.chat;
    if (!this.#awaited.size) return;
    for (const one of Object.values(state.ended)) {
      const note = this.#awaited.get(one.id);
      if (note && this.#awaited.delete(one.id)) this.#describe(note, one);
    }
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    this.#log.replaceChildren(el("p", { class: "empty" }, "Ask something: the answer says which instances computed it."));
  }

  #submit() {
    if (this.#abort) return this.#abort.abort();
    const text = this.#text.value.trim();
    if (!text) return;
    this.#text.value = "";
    if (!this.#messages.length) this.#log.replaceChildren();
    this.#messages.push({ role: "user", content: text });
    this.#add("user", text);
    this.#answer();
  }

  #add(role, text) {
    const body = el("div", { class: "text" }, text);
    const note = el("div", { class: "note muted" });
    this.#log.append(el("div", { class: `message ${role}` }, body, note));
    this.#follow();
    return { body, note };
  }

  #follow() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  async #answer() {
    const messages = this.#messages; // "New" begins others
    const { body, note } = this.#add("assistant", "");
    this.#abort = new AbortController();
    this.#send.textContent = "Stop";
    let answer = "", thoughts;
    try {
      for await (const { text, reasoning } of this.#pieces(note)) {
        if (reasoning && !thoughts) body.before((thoughts = el("div", { class: "text muted" })));
        thoughts?.append(reasoning);
        answer += text;
        body.append(text);
        this.#follow();
      }
    } catch (error) {
      if (error.name !== "AbortError") note.replaceChildren(el("span", { class: "bad" }, error.message));
    } finally {
      this.#abort = undefined;
      this.#send.textContent = "Send";
      if (answer) messages.push({ role: "assistant", content: answer });
      else messages.pop();
    }
  }

  async *#pieces(note) {
    const options = { stream: true, max_tokens: byId("chat-max").valueAsNumber || 128 };
    const prompt = this.#messages.map((message) => message.content).join("\n");
    const [path, content] = this.#hasChat ? ["v1/chat/completions", { messages: this.#messages }] : ["v1/completions", { prompt }];
    const response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...this.headers() },
      body: JSON.stringify({ ...content, ...options }),
      signal: this.#abort.signal,
    });
    if (!response.ok) {
      const problem = await problemOf(response);
      if (problem.status === 401) this.onLocked("The chat needs an API key.");
      throw new Error(problem.message);
    }
    this.#await(response.headers, note);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const { delta, text } = event.choices[0] ?? {};
      yield { text: delta?.content ?? text ?? "", reasoning: delta?.reasoning_content ?? "" };
    }
  }

  /** Shows the route that the headers give, until the request's own record comes. */
  #await(headers, note) {
    const names = ["tandem-prefill", "tandem-decode"].map((name) => headers.get(name)).filter(Boolean);
    this.#route(note, names.flatMap((value) => value.split(",")));
    const id = headers.get("x-request-id");
    this.#awaited.set(id, note);
    this.#abort.signal.addEventListener("abort", () => setTimeout(() => this.#awaited.delete(id), LOOKED_UP_MS));
  }

  #route(note, names) {
    const chips = names.flatMap((name, index) => [...(index ? [" → "] : []), el("span", { class: "chip" }, name)]);
    note.replaceChildren(...chips);
  }

  #describe(note, one) {
    this.#route(note, [...one.prefill, ...one.decode]);
    const rate = one.itl_ms ? `, ${perSecond(1000 / one.itl_ms)} tokens/s` : "";
    note.append(el("span", { title: one.reason }, ` first token ${milliseconds(one.ttft_ms)}${rate}, ${one.tokens} tokens`), stageBar(one.stages, one.total_ms));
    this.#follow();
  }
}
