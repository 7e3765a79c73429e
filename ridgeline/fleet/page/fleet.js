"use strict";
// Text from the gateway only ever becomes text nodes; nothing is fetched from another address.

const $ = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
let key = sessionStorage.getItem("ridgeline-key");

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function askKey() {
  const dialog = $("key-dialog");
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  key = $("key").value;
  sessionStorage.setItem("ridgeline-key", key);
}

async function read() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const reply = await fetch("/ridgeline/fleet", { headers });
  if (reply.status === 401) {
    await askKey();
    return read();
  }
  if (!reply.ok) throw new Error(`HTTP status ${reply.status}`);
  return reply.json();
}

function tile(label, value, note) {
  const made = element("div", "", "card tile short");
  made.append(element("h2", label), element("div", value, "big"), element("div", note || "", "sub"));
  return made;
}

function show(fleet) {
  const ready = fleet.backends.filter((each) => each.state === "ready").length;
  const inFlight = fleet.backends.reduce((sum, each) => sum + each.in_flight, 0);
  $("models").textContent = fleet.models.join(", ") || "no model";
  $("health").className = `dot ${ready ? "good" : "bad"}`;
  $("health").title = `${ready} of ${fleet.backends.length} servers are ready`;
  $("tiles").replaceChildren(
    tile("Servers ready", `${ready} of ${fleet.backends.length}`, `${fleet.wanted_replicas} wanted`),
    tile("Requests in flight", number(inFlight), `${fleet.num_parked} wait for a server`),
    tile("Oldest without a byte", `${number(fleet.oldest_s)} s`),
    tile("Requests", number(fleet.counts.requests)),
    tile("Streams resumed", number(fleet.counts.resumed), `${number(fleet.counts.migrated)} from stopping servers`),
    tile("Streams lost", number(fleet.counts.lost), `${fleet.num_suspects} suspects`),
  );
  const names = $("backends").tHead.rows[0].cells;
  $("backends").tBodies[0].replaceChildren(...fleet.backends.map((each) => {
    const row = document.createElement("tr");
    const cells = [each.url, each.state, each.arm, each.models.join(", "), number(each.in_flight), number(each.queued_tokens), number(each.prefill_tok_s)];
    row.append(...cells.map((text, i) => {
      const cell = element("td", text);
      if (i) cell.dataset.name = names[i].textContent; // shown where the head of the table is not
      return cell;
    }));
    return row;
  }));
  $("canary").hidden = !fleet.canary;
  $("canary").textContent = `Canary: ${fleet.canary}. ${fleet.canary_reasons.join("; ")}`;
}

async function run() {
  for (;;) {
    try {
      show(await read());
      $("note").textContent = "Updated every second. Totals are since the gateway's start.";
    } catch (error) {
      $("health").className = "dot bad";
      $("note").textContent = `The gateway does not answer: ${error.message}`;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

run();
