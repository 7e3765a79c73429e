// The page has four parts, each with a function that starts it (chat: chat.js). Text from the server
// only ever becomes text nodes; nothing is fetched from another address.

const $ = (id) => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const milliseconds = (seconds) =>
  seconds < 0.01 ? number(seconds * 1000, 1) : number(seconds * 1000);

// requests to the server

const server = {
  key: sessionStorage.getItem("ridgeline-key"),
  asking: null,
  async call(path, options = {}) {
    const headers = { ...(options.headers || {}) };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const reply = await fetch(path, { ...options, headers });
    if (reply.status === 401) {
      await this.askKey();
      return this.call(path, options);
    }
    if (!reply.ok) {
      const failure = await reply.json().catch(() => null);
      const error = new Error(failure?.error?.message || `HTTP status ${reply.status}`);
      error.status = reply.status;
      throw error;
    }
    return reply;
  },
  async json(path, options) { return (await this.call(path, options)).json(); },
  askKey() {
    this.asking ||= new Promise((resolve) => {
      const dialog = $("key-dialog");
      dialog.showModal();
      dialog.addEventListener("close", () => {
        this.key = $("key").value;
        sessionStorage.setItem("ridgeline-key", this.key);
        this.asking = null;
        resolve();
      }, { once: true });
    });
    return this.asking;
  },
};

// live metrics, read from /metrics

function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match || line.startsWith("#")) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    if (!metrics.has(match[1])) metrics.set(match[1], []);
    metrics.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return metrics;
}
const total = (sample, name, want = {}) =>
  (sample.get(name) || []).filter(({ labels }) => Object.entries(want).every(([k, v]) => labels[k] === v)).reduce((sum, each) => sum + each.value, 0);

function quantile(now, before, name, share) {
  const at = (sample) => {
    const counts = new Map();
    for (const { labels, value } of sample?.get(`${name}_bucket`) || []) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(edge, (counts.get(edge) || 0) + value);
    }
    return counts;
  };
  const old = at(before);
  const counts = [...at(now)].map(([edge, value]) => [edge, value - (old.get(edge) || 0)]).sort((a, b) => a[0] - b[0]);
  const all = counts.length ? counts.at(-1)[1] : 0;
  if (all <= 0) return null;
  let low = 0, below = 0;
  for (const [edge, upTo] of counts) {
    if (upTo >= share * all) {
      if (edge === Infinity) return low;
      return low + (edge - low) * ((share * all - below) / Math.max(upTo - below, 1e-9));
    }
    [low, below] = [edge, upTo];
  }
  return low;
}

const NUM_POINTS = 120, WINDOW = 60;
const live = {
  samples: [],
  points: [],
  pointed: null,
  slots: null,
  slo: { ttft: 500, itl: 50 },
  begin(config) {
    this.slots = config?.settings?.max_num_seqs ?? null;
    const saved = JSON.parse(localStorage.getItem("ridgeline-slo") || "null");
    Object.assign(this.slo, saved || {});
    if (config?.slo?.ttft_s) this.slo.ttft = config.slo.ttft_s * 1000;
    if (config?.slo?.tpot_s) this.slo.itl = config.slo.tpot_s * 1000;
    for (const name of ["ttft", "itl"]) {
      const input = $(`slo-${name}`);
      input.value = this.slo[name];
      input.addEventListener("input", () => {
        if (Number(input.value) > 0) this.slo[name] = Number(input.value);
        localStorage.setItem("ridgeline-slo", JSON.stringify(this.slo));
        this.draw();
      });
    }
    $("slo").addEventListener("submit", (event) => event.preventDefault());
    $("tiles").replaceChildren(...TILES.map((tile) => tileOf(tile)));
    this.classes = config?.slo_classes || {};
    $("slo-classes").hidden = !Object.keys(this.classes).length;
    this.poll();
  },
  async poll() {
    try {
      const text = await (await server.call("/metrics")).text();
      this.samples.push({ at: performance.now() / 1000, of: parseMetrics(text) });
      this.samples = this.samples.slice(-NUM_POINTS - WINDOW);
      this.draw();
    } catch (error) {
      $("live-note").textContent = `Metrics are not updating: ${error.message}`;
    }
    setTimeout(() => this.poll(), 1000);
  },
  draw() {
    if (!this.samples.length || $("tab-live").hidden) return;
    const first = Math.max(0, this.samples.length - NUM_POINTS);
    this.points = this.samples.slice(first).map((_, i) => this.at(first + i));
    for (const tile of TILES) drawTile(tile, this.points, this);
    $("classes").tBodies[0].replaceChildren(...Object.entries(this.classes).map(([name, slo]) => this.sloRow(name, slo)));
  },
  sloRow(slo_class, slo) {
    const now = this.samples.at(-1), back = this.samples[Math.max(0, this.samples.length - 1 - WINDOW)];
    const recent = (what, want = {}) => total(now.of, `ridgeline_slo_${what}_total`, { slo_class, ...want }) - (back === now ? 0 : total(back.of, `ridgeline_slo_${what}_total`, { slo_class, ...want }));
    const limits = ["ttft", "tpot", "e2e"].filter((name) => slo[`${name}_s`] != null);
    const all = recent("requests"), share = all ? recent("met") / all : null;
    const missed = [...limits, "failed"].map((why) => [why, recent("missed", { why })]).filter(([, count]) => count);
    const tone = share == null ? "" : share >= slo.attainment ? "good" : "bad";
    return el("tr", {},
      el("td", {}, slo_class),
      el("td", {}, limits.map((name) => `${name} ${milliseconds(slo[`${name}_s`])} ms`).join(" · ")),
      el("td", {}, number(all)),
      el("td", {}, el("span", { class: `chip ${tone}` }, share == null ? "no request" : `${number(share * 100, share < 1 ? 1 : 0)} %`)),
      el("td", {}, missed.map(([why, count]) => `${why} ${number(count)}`).join(" · ") || "–"));
  },
  at(i) {
    const now = this.samples[i], before = this.samples[Math.max(0, i - 1)];
    const back = this.samples[Math.max(0, i - WINDOW)];
    const passed = Math.max(now.at - before.at, 1e-3);
    const rate = (name, want) => Math.max(0, (total(now.of, name, want) - total(before.of, name, want)) / passed);
    const recent = (name) => total(now.of, name) - total(back.of, name);
    const queries = recent("vllm:prefix_cache_queries_total");
    const latency = (name, share) => quantile(now.of, back === now ? null : back.of, name, share);
    const running = total(now.of, "vllm:num_requests_running");
    return {
      running,
      waiting: total(now.of, "vllm:num_requests_waiting"),
      fill: this.slots ? running / this.slots : null,
      lines: total(now.of, "ridgeline_batch_requests_running"),
      open: total(now.of, "ridgeline_batch_requests_open"),
      kv: total(now.of, "vllm:kv_cache_usage_perc"),
      blocks: Number((now.of.get("vllm:cache_config_info") || [])[0]?.labels.num_gpu_blocks || 0),
      hits: queries > 0 ? recent("vllm:prefix_cache_hits_total") / queries : null,
      speed: rate("vllm:generation_tokens_total"),
      linesSpeed: rate("ridgeline_batch_tokens_total", { kind: "completion" }),
      prompt: rate("vllm:prompt_tokens_total"),
      preempted: total(now.of, "vllm:num_preemptions_total"),
      finished: total(now.of, "vllm:request_success_total"),
      ttft: latency("vllm:time_to_first_token_seconds", 0.5),
      ttft95: latency("vllm:time_to_first_token_seconds", 0.95),
      itl: latency("vllm:inter_token_latency_seconds", 0.5),
      itl95: latency("vllm:inter_token_latency_seconds", 0.95),
    };
  },
};

const percent = (value) => (value == null ? ["–", ""] : [number(value * 100), "%"]);
const inPercent = (top) => `${number(top * 100)} %`;
const latencyTile = (name, of95) => ({
  limit: (live) => live.slo[name] / 1000,
  chip: (p, live) => (p[of95] == null ? null : p[of95] * 1000 <= live.slo[name] ? ["met", "good"] : ["missed", "bad"]),
  sub: (p) => (p[of95] == null ? "no request in the last minute" : `p95 ${milliseconds(p[of95])} ms`),
  big: (p) => (p[name] == null ? ["–", ""] : [milliseconds(p[name]), "ms, p50"]),
  scale: (top) => `${milliseconds(top)} ms`,
  at: (p) => (p[of95] == null ? "nothing" : `p95 ${milliseconds(p[of95])} ms`),
});
const TILES = [
  { id: "requests", title: "Requests running", series: ["running", "waiting"], big: (p) => [number(p.running), ""], sub: (p) => `${number(p.waiting)} waiting · ${number(p.finished)} finished`, at: (p) => `${number(p.running)} running, ${number(p.waiting)} waiting` },
  { id: "ttft", title: "Time to first token", series: ["ttft95"], ...latencyTile("ttft", "ttft95") },
  { id: "itl", title: "Inter-token latency", series: ["itl95"], ...latencyTile("itl", "itl95") },
  { id: "speed", title: "Output", series: ["speed"], big: (p) => [number(p.speed), "tok/s"], sub: (p) => `prompts ${number(p.prompt)} tok/s · batch ${number(p.linesSpeed)} tok/s` },
  { id: "fill", title: "Batch fill", series: ["fill"], top: () => 1, scale: inPercent, big: (p) => percent(p.fill), sub: (p, live) => (live.slots ? `${number(p.running)} of ${number(live.slots)} slots · ${number(p.lines)} by batch requests` : "slots unknown") },
  { id: "kv", title: "KV blocks in use", series: ["kv"], top: () => 1, scale: inPercent, big: (p) => percent(p.kv), sub: (p) => (p.blocks ? `${number(Math.round(p.kv * p.blocks))} of ${number(p.blocks)} blocks · ${number(p.preempted)} preemptions` : `${number(p.preempted)} preemptions`) },
  { id: "hits", title: "Prompts from the cache", series: ["hits"], top: () => 1, scale: inPercent, big: (p) => percent(p.hits), sub: () => "of the last minute" },
  { id: "lines", title: "Open batch requests", series: ["open"], big: (p) => [number(p.open), ""], sub: (p) => `${number(p.lines)} running` },
];

function tileOf(tile) {
  const svg = shape("svg", { viewBox: "0 0 120 48", preserveAspectRatio: "none", "aria-hidden": "true" });
  const chart = el("div", { class: "chart" }, svg, el("span", { class: "scale" }), el("i", { class: "cursor", hidden: true }), el("span", { class: "tip", hidden: true }));
  chart.addEventListener("pointermove", (event) => { live.pointed = { id: tile.id, x: event.offsetX / chart.clientWidth }; drawTip(tile, live.points); });
  chart.addEventListener("pointerleave", () => { live.pointed = null; drawTip(tile, live.points); });
  return el("div", { class: "card tile", id: `tile-${tile.id}` }, el("h2", {}, tile.title, el("span", { class: "chip", hidden: true })), el("div", { class: "big" }, "–"), el("div", { class: "sub" }, ""), chart);
}

function drawTile(tile, points, live) {
  const box = $(`tile-${tile.id}`), last = points.at(-1);
  const [value, unit] = tile.big(last, live);
  box.querySelector(".big").replaceChildren(value, ...(unit ? [el("small", {}, unit)] : []));
  box.querySelector(".sub").textContent = tile.sub(last, live);
  const state = tile.chip?.(last, live), chip = box.querySelector(".chip");
  chip.hidden = !state;
  if (state) { chip.textContent = state[0]; chip.className = `chip ${state[1]}`; }
  const limit = tile.limit?.(live);
  const values = tile.series.map((name) => points.map((p) => p[name]));
  const highest = Math.max(...values.flat().map((v) => v ?? 0), (limit ?? 0) * 1.1);
  const top = tile.top?.() ?? Math.max(highest, 1e-9) * 1.08;
  const marks = values.map((each, i) => line(each, top, i)).flat();
  if (limit != null) {
    const y = 46 - 44 * Math.min(1, limit / top);
    marks.push(shape("line", { x1: 0, x2: 120, y1: y, y2: y, class: "limit" }));
  }
  box.querySelector("svg").replaceChildren(...marks);
  box.querySelector(".scale").textContent = highest > 0 ? (tile.scale || number)(tile.top?.() ?? highest) : "";
  drawTip(tile, points);
}

// The sample under the pointer.
function drawTip(tile, points) {
  const chart = $(`tile-${tile.id}`).querySelector(".chart");
  const cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  const pointed = live.pointed?.id === tile.id ? live.pointed : null;
  const ago = pointed && Math.floor(NUM_POINTS * (1 - pointed.x)), point = pointed && points.at(-1 - ago);
  cursor.hidden = tip.hidden = !point;
  if (!point) return;
  cursor.style.left = `${pointed.x * 100}%`;
  tip.textContent = `${ago ? `${ago} s ago` : "now"}: ${tile.at ? tile.at(point) : tile.big(point, live).join(" ")}`;
  tip.style.left = pointed.x < 0.5 ? `${pointed.x * 100}%` : "auto";
  tip.style.right = pointed.x < 0.5 ? "auto" : `${(1 - pointed.x) * 100}%`;
}

function line(values, top, place) {
  const start = NUM_POINTS - values.length;
  const points = values.map((v, i) => (v == null ? null : [start + i + 1, 46 - 44 * Math.min(1, v / top)])).filter(Boolean);
  if (points.length < 2) return [];
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x} ${y.toFixed(2)}`).join("");
  const stroke = shape("path", { d: path, class: place ? "spark second" : "spark" });
  if (place) return [stroke];
  return [shape("path", { d: `${path}L${points.at(-1)[0]} 48L${points[0][0]} 48Z`, class: "area" }), stroke];
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// batches

const TONE = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn", cancelling: "warn" };
const batches = {
  begin(config) {
    const served = Boolean(config?.batches);
    $("no-batches").hidden = served;
    $("with-batches").hidden = !served;
    if (!served) return;
    $("file").addEventListener("change", () => { $("file-name").textContent = $("file").files[0]?.name || "Choose a .jsonl file"; });
    $("submit").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.poll();
  },
  async submit() {
    const file = $("file").files[0], note = $("submit-note");
    if (!file) return;
    $("start").disabled = true;
    note.className = "note";
    note.textContent = "Uploading…";
    try {
      const first = (await file.slice(0, 65536).text()).split("\n").find((text) => text.trim()) || "";
      const endpoint = /"url"\s*:\s*"([^"]+)"/.exec(first)?.[1] || "/v1/chat/completions";
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      const stored = await server.json("/v1/files", { method: "POST", body: form });
      const body = JSON.stringify({ input_file_id: stored.id, endpoint, completion_window: $("window").value });
      await server.json("/v1/batches", { method: "POST", headers: { "content-type": "application/json" }, body });
      note.textContent = "Started.";
      $("submit").reset();
      $("file-name").textContent = "Choose a .jsonl file";
    } catch (error) {
      note.className = "note error";
      note.textContent = error.message;
    }
    $("start").disabled = false;
    this.look();
  },
  async poll() {
    if (!$("tab-batches").hidden) await this.look();
    setTimeout(() => this.poll(), 1500);
  },
  async look() {
    const page = await server.json("/v1/batches?limit=50").catch(() => null);
    if (!page) return;
    $("no-jobs").hidden = page.data.length > 0;
    $("jobs").replaceChildren(...page.data.map((batch) => this.card(batch)));
  },
  card(batch) {
    const counts = batch.request_counts, share = (n) => `${counts.total ? (100 * n) / counts.total : 0}%`;
    const meter = el("div", { class: "meter", role: "progressbar", "aria-label": "requests completed" }, el("i"), el("i", { class: "failed" }));
    [counts.completed, counts.failed].forEach((n, i) => { meter.children[i].style.width = share(n); });
    const button = (text, act) => el("button", { class: "quiet small", type: "button", onclick: act }, text);
    const hasEnded = ["completed", "failed", "expired", "cancelled"].includes(batch.status);
    const facts = [
      new Date(batch.created_at * 1000).toLocaleString(),
      batch.status === "validating" ? "reading the file" : `${number(counts.completed)} of ${number(counts.total)} completed`,
      ...(counts.failed ? [`${number(counts.failed)} failed`] : []),
      `${number(batch.usage.total_tokens)} tokens, charged as ${number(batch.charge.input_tokens + batch.charge.output_tokens)}`,
      batch.endpoint,
      hasEnded ? `took ${this.span((batch.completed_at || batch.expired_at || batch.cancelled_at || batch.failed_at) - batch.created_at)}` : `${this.span(batch.expires_at - Date.now() / 1000)} left`,
    ];
    return el("article", { class: "card job" },
      el("div", { class: "top" }, el("span", { class: "id" }, batch.id), el("span", { class: `chip ${TONE[batch.status] || ""}` }, batch.status.replace("_", " ")), el("span", { class: "grow" }),
        ...(batch.output_file_id ? [button("Results", () => this.download(batch.output_file_id))] : []),
        ...(batch.error_file_id ? [button("Errors", () => this.download(batch.error_file_id))] : []),
        ...(["validating", "in_progress"].includes(batch.status) ? [button("Cancel", () => this.cancel(batch.id))] : [])),
      ...(counts.total ? [meter] : []),
      el("div", { class: "facts" }, ...facts.map((fact) => el("span", {}, fact))),
      ...(batch.errors ? [el("ul", { class: "errors" }, ...batch.errors.data.slice(0, 5).map((e) => el("li", {}, `${e.line ? `line ${e.line}: ` : ""}${e.message}`)))] : []));
  },
  span(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 90) return `${s} s`;
    return s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
  },
  async cancel(id) { await server.json(`/v1/batches/${id}/cancel`, { method: "POST" }).catch(() => null); this.look(); },
  async download(id) {
    const file = await server.json(`/v1/files/${id}`);
    const data = await (await server.call(`/v1/files/${id}/content`)).blob();
    const link = el("a", { href: URL.createObjectURL(data), download: file.filename });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  },
};

// configuration

const settings = {
  begin(config) {
    const rows = Object.entries(config?.settings || {}).map(([name, value]) => [name, this.shown(name, value), config.derivations[name] || ""]);
    for (const [name, why] of Object.entries(config?.derivations || {})) if (!(name in config.settings)) rows.push([name, "", why]);
    const draw = () => {
      const query = $("filter").value.toLowerCase();
      const matching = rows.filter((row) => row.join(" ").toLowerCase().includes(query));
      $("settings").tBodies[0].replaceChildren(...matching.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell)))));
    };
    $("filter").addEventListener("input", draw);
    draw();
  },
  shown(name, value) {
    if (value === null || value === "" || (Array.isArray(value) && !value.length)) return "not set";
    if (typeof value === "boolean") return value ? "on" : "off";
    if (typeof value !== "number") return String(value);
    return name.endsWith("_bytes") ? `${number(value / 2 ** 20, 1)} MiB` : Number.isInteger(value) && value > 9999 ? number(value) : String(value);
  },
};

// tabs

function open() {
  const names = ["chat", "live", "batches", "config"];
  const shown = names.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  for (const name of names) $(`tab-${name}`).hidden = name !== shown;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.hash === `#${shown}`);
  if (shown === "live") live.draw();
  if (shown === "batches" && !$("with-batches").hidden) batches.look();
  if (shown === "chat") $("prompt").focus();
}

async function watchHealth() {
  const good = await fetch("/health").then((reply) => reply.ok, () => false);
  $("health").className = `dot ${good ? "good" : "bad"}`;
  $("health").title = good ? "the engine makes progress" : "the engine makes no progress";
  setTimeout(watchHealth, 5000);
}

async function main() {
  chat.begin();
  open();
  window.addEventListener("hashchange", open);
  watchHealth();
  const config = await server.json("/ridgeline/config").catch(() => null);
  if (config) {
    $("model").textContent = $("hello-model").textContent = config.served_model_name;
    document.title = `${config.served_model_name} · Ridgeline`;
    $("temperature").placeholder = config.default_sampling?.temperature ?? 0.7;
  }
  live.begin(config);
  batches.begin(config);
  settings.begin(config);
  open();
}
main();
