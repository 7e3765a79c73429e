// The chat. Conversations are kept in this browser's localStorage, and are sent to no other server.

const SAVED = "ridgeline-chats", MAX_CHATS = 30;

const chat = {
  chats: [],  // {id, title, turns: [{role, content, reasoning, finish, figures, error}]}, latest first
  current: null,
  editing: null,  // index of the turn that the next message replaces
  abort: null,
  begin() {
    this.chats = this.load();
    $("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("clear").addEventListener("click", () => this.open(null));
    $("history").addEventListener("change", () => this.open($("history").value));
    $("delete").addEventListener("click", () => this.remove());
    const prompt = $("prompt");
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("ask").requestSubmit();
      }
      if (event.key === "Escape") this.edit(null);
    });
    prompt.addEventListener("input", () => this.fit());
    this.open(this.chats[0]?.id ?? null);
  },
  load() {
    try {
      return JSON.parse(localStorage.getItem(SAVED)) || [];
    } catch {
      return [];
    }
  },
  save() {
    this.chats = [this.current, ...this.chats.filter((each) => each !== this.current)].slice(0, MAX_CHATS);
    for (let kept = this.chats.length; kept > 0; kept -= 1) {
      try {
        localStorage.setItem(SAVED, JSON.stringify(this.chats.slice(0, kept)));
        break;
      } catch { /* the browser's quota is used up: keep fewer */ }
    }
    this.listChats();
  },
  listChats() {
    const entry = (each) => el("option", { value: each.id, selected: each === this.current }, each.title);
    $("history").replaceChildren(el("option", { value: "", selected: !this.chats.includes(this.current) }, "Earlier chats"), ...this.chats.map(entry));
    $("history").hidden = !this.chats.length;
    $("delete").hidden = !this.chats.includes(this.current);
  },
  open(id) {
    this.abort?.abort();
    this.edit(null);
    this.current = this.chats.find((each) => each.id === id) || { id: String(Date.now()), title: "", turns: [] };
    this.listChats();
    this.draw();
  },
  remove() {
    this.chats = this.chats.filter((each) => each !== this.current);
    localStorage.setItem(SAVED, JSON.stringify(this.chats));
    this.open(null);
  },
  draw() {
    for (const said of document.querySelectorAll(".said")) said.remove();
    const { turns } = this.current;
    $("hello").hidden = turns.length > 0;
    turns.forEach((turn, i) => $("talk").append(this.show(turn, i)));
    this.follow(true);
  },
  show(turn, i) {
    const copy = iconButton("copy", "Copy", () => copyText(turn.content, copy));
    if (turn.role === "user") {
      return el("div", { class: "said user" }, turn.content, el("div", { class: "actions" }, copy, iconButton("edit", "Edit", () => this.edit(i))));
    }
    const said = el("div", { class: "said assistant" });
    new AnswerView(said).draw(turn);
    const again = i === this.current.turns.length - 1 ? [iconButton("again", "Answer again", () => this.regenerate())] : [];
    said.append(el("div", { class: "actions" }, copy, ...again));
    return said;
  },
  edit(i) {
    const was = this.editing;
    this.editing = i;
    document.querySelectorAll(".said").forEach((said, at) => said.classList.toggle("replaced", i !== null && at >= i));
    $("editing").hidden = i === null;
    if (i !== null) $("prompt").value = this.current.turns[i].content;
    else if (was !== null) $("prompt").value = "";
    this.fit();
    if (i !== null) $("prompt").focus();
  },
  fit() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  },
  async send() {
    const text = $("prompt").value.trim();
    if (!text || this.abort) return;
    const { turns } = this.current;
    if (this.editing !== null) turns.length = this.editing;
    this.edit(null);
    $("prompt").value = "";
    this.fit();
    this.current.title ||= text.replace(/\s+/g, " ").slice(0, 48);
    turns.push({ role: "user", content: text });
    await this.answer();
  },
  async regenerate() {
    if (this.abort) return;
    this.current.turns.pop();
    await this.answer();
  },
  async answer() {
    const conversation = this.current, answer = new Answer();
    this.save();
    this.draw();
    const said = el("div", { class: "said assistant" });
    $("talk").append(said);
    const view = new AnswerView(said);
    this.follow(true);
    this.abort = new AbortController();
    this.busy(true);
    let queued = false;
    const redraw = () => {  // at most once per frame
      if (queued) return;
      queued = true;
      requestAnimationFrame(() => { queued = false; if (said.isConnected && this.abort) { view.draw(answer.turn(), true); this.follow(); } });
    };
    view.draw(answer.turn(), true);
    try {
      await this.stream(conversation.turns, answer, this.abort.signal, redraw);
    } catch (error) {
      answer.error = error.name === "AbortError" ? null : error.message;
      answer.finish = error.name === "AbortError" ? "abort" : "error";
    }
    conversation.turns.push(answer.turn());
    this.abort = null;
    this.busy(false);
    const shown = this.current;
    this.current = conversation;
    if (this.chats.includes(conversation)) this.save();
    this.current = shown;
    this.listChats();
    if (shown === conversation) this.draw();
  },
  busy(yes) {
    $("send").hidden = yes;
    $("stop").hidden = !yes;
    if (!yes) $("prompt").focus();
  },
  follow(always = false) {
    const talk = $("talk");
    if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
  },
  async stream(turns, answer, signal, redraw) {
    const system = $("system").value.trim(), limit = Number($("max-tokens").value);
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }))];
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    const temperature = $("temperature").value || $("temperature").placeholder;
    body.temperature = Number(temperature);
    if (limit > 0) body.max_tokens = limit;
    const reply = await server.call("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal,
      body: JSON.stringify(body),
    });
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
      redraw();
    }
  },
};

async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

// An answer as it arrives.
class Answer {
  constructor() {
    Object.assign(this, { text: "", reasoning: "", count: 0, usage: null, finish: null, error: null, first: null, last: null });
    this.sent = performance.now();
  }
  take(chunk) {
    this.usage = chunk.usage || this.usage;
    for (const choice of chunk.choices) {
      this.finish = choice.finish_reason || this.finish;
      const content = choice.delta?.content, reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
      if (!content && !reasoning) continue;
      this.last = performance.now();
      this.first ??= this.last;
      this.count += 1;
      this.text += content || "";
      this.reasoning += reasoning || "";
    }
  }
  // A model may write its reasoning into the answer, where the server has no parser for it.
  turn() {
    const inside = /^\s*<think>([\s\S]*?)(?:<\/think>([\s\S]*)|$)/.exec(this.text);
    const reasoning = this.reasoning || (inside ? inside[1].trim() : "");
    const content = !this.reasoning && inside ? (inside[2] || "").trimStart() : this.text;
    return { role: "assistant", content, reasoning, finish: this.finish, error: this.error, figures: this.figures(), tokens: this.usage?.completion_tokens ?? this.count };
  }
  figures() {
    if (this.first === null) return [];
    const tokens = this.usage?.completion_tokens ?? this.count;
    const parts = [["TTFT", `${milliseconds((this.first - this.sent) / 1000)} ms`]];
    if (this.last > this.first && tokens > 7) parts.push(["", `${number(((tokens - 1) / (this.last - this.first)) * 1000, 1)} tok/s`]);
    parts.push(["", `${number(tokens)} tokens`]);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(["", `${number(cached)} of ${number(this.usage.prompt_tokens)} prompt tokens cached`]);
    return parts;
  }
}

const NOTICES = {
  length: (turn) => `Cut off after ${number(turn.tokens)} tokens: the limit is under Sampling, or the context is full.`,
  abort: () => "Stopped.",
};

// The elements of an answer; `draw` may be called again while it grows.
class AnswerView {
  constructor(said) {
    this.thought = el("div", { class: "thought" });
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.body = el("div", { class: "answer" });
    this.figures = el("div", { class: "figures" });
    this.notice = el("p", { class: "notice", hidden: true });
    this.error = el("div", { role: "alert", hidden: true });
    said.append(this.reasoning, this.body, this.notice, this.error, this.figures);
  }
  draw(turn, growing = false) {
    this.body.classList.toggle("caret", growing && (Boolean(turn.content) || !turn.reasoning));
    this.body.replaceChildren(...markdown(turn.content));
    this.reasoning.hidden = !turn.reasoning;
    if (growing) this.reasoning.open = !turn.content;  // folded as soon as the answer begins
    this.thought.textContent = turn.reasoning || "";
    this.figures.replaceChildren(...(turn.figures || []).map(([name, value]) => el("span", {}, name ? `${name} ` : "", el("b", {}, value))));
    const notice = growing ? null : NOTICES[turn.finish]?.(turn);
    this.notice.hidden = !notice;
    this.notice.textContent = notice || "";
    this.error.hidden = !turn.error;
    this.error.className = turn.error ? "error" : "";
    this.error.textContent = turn.error || "";
  }
}
