// The live page in a headless Chromium: `node browser.mjs SCENARIO URL`. Each step is one line of JSON; after it, the
// scenario goes on when a line comes in, so that the test can change what the page looks at.
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [scenario, url, folder] = process.argv.slice(2);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const WAIT = { timeout: 90_000 };

/** Reports, and waits for the line with which the test answers. */
async function step(name, values = {}) {
  console.log(JSON.stringify({ step: name, ...values }));
  const { value, done } = await lines.next();
  if (done) throw new Error("the test has ended");
  return value;
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
  ],
});

async function open({ width = 1440, height = 1000, colorScheme = "light", before = () => {} } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme });
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT.timeout);
  page.problems = [];
  page.on("console", (message) => message.type() === "error" && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(error.message));
  await before(page);
  await page.goto(url);
  return page;
}

/** Records the tasks of the page's main thread; the function that it returns gives their CPU times in ms, longest first. */
async function mainThread(page) {
  const client = await page.context().newCDPSession(page);
  const events = [];
  client.on("Tracing.dataCollected", ({ value }) => events.push(...value));
  await client.send("Tracing.start", { categories: "devtools.timeline,disabled-by-default-devtools.timeline", transferMode: "ReportEvents" });
  return async () => {
    const complete = new Promise((resolve) => client.once("Tracing.tracingComplete", resolve));
    await client.send("Tracing.end");
    await complete;
    const threads = events.filter(({ name, args }) => name === "thread_name" && args.name === "CrRendererMain");
    const isOnMain = ({ pid, tid }) => threads.some((one) => one.pid === pid && one.tid === tid);
    const tasks = events.filter((event) => event.name.endsWith("RunTask") && event.tdur && isOnMain(event));
    return tasks.map(({ tdur }) => tdur / 1000).sort((one, other) => other - one);
  };
}

const isLive = (page) => page.waitForFunction(() => document.querySelector("#status").textContent === "live", null, WAIT);
const isScrolling = (page) => page.evaluate(() => document.documentElement.scrollWidth > document.documentElement.clientWidth);

const scenarios = {
  /** Many instances and requests: what an update costs, and a router that goes and comes back. */
  async load() {
    const page = await open();
    await isLive(page);
    const rows = await page.locator("#pools tbody").count();
    await page.locator("#ended tbody button").first().evaluate((button) => button.click());
    const tasks = await mainThread(page);
    await step("live", { rows, details: await page.locator("#ended .timeline li").count() });
    await step("watched", { tasks_ms: (await tasks()).slice(0, 20), problems: page.problems });
    await page.waitForFunction(() => document.querySelector("#status").dataset.state === "lost", null, WAIT);
    await step("lost", { text: await page.locator("#status").textContent() });
    await isLive(page);
    const phone = await open({ width: 390, height: 844, colorScheme: "dark" });
    await isLive(phone);
    await step("again", { rows: await page.locator("#pools tbody").count(), scrolls: await isScrolling(phone) });
  },

  /** Another router at the same address, whose requests have the numbers of the first one's. */
  async another() {
    const page = await open();
    await isLive(page);
    const button = page.locator("#ended tbody button").nth(20);
    await button.evaluate((button) => button.click());
    const opened = await page.locator("#ended tbody:has(.details) button").textContent();
    await step("opened");
    await page.waitForFunction(() => document.querySelector("#status").dataset.state === "lost", null, WAIT);
    await isLive(page);
    await page.waitForFunction(() => [...document.querySelectorAll("#ended tbody button")].some((one) => one.textContent.startsWith("second-")), null, WAIT);
    const names = await page.locator("#ended tbody button").allTextContents();
    const kept = names.filter((name) => name.startsWith("first-"));
    const numbers = names.filter((name) => !kept.includes(name)).map((name) => Number(name.split("-")[1]));
    const others = [...new Set(names.filter((name) => !kept.includes(name)).map((name) => name.split("-")[0]))];
    const ordered = numbers.every((number, index) => !index || number < numbers[index - 1]);
    await step("again", { opened, kept, others, ordered });
  },

  /** Without a token the page asks for it, and works with it. */
  async locked() {
    const page = await open({ before: (page) => page.addInitScript(() => {
      const { setTimeout } = window;
      window.setTimeout = (act, milliseconds, ...others) => setTimeout(act, milliseconds === 30_000 ? 50 : milliseconds, ...others);
    }) });
    await page.locator("#access[open]").waitFor();
    await step("asked", { text: await page.locator("#access-problem").textContent() });
    await page.locator("#admin-token").fill("operators-token");
    const hide = (isHidden) => page.evaluate((isHidden) => {
      Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, isHidden);
    const shows = (status) => page.waitForFunction((status) => document.querySelector("#status").dataset.state === status, status, WAIT);
    await hide(true);
    await shows("paused");
    await hide(false);
    await shows("locked");
    await step("shown", { token: await page.locator("#admin-token").inputValue() });
    await page.keyboard.press("Enter");
    await isLive(page);
    await step("live", {});
  },

  /** An answer that is no stream is shown as what it says. */
  async refused() {
    const body = JSON.stringify({ error: { message: "Host must be an IP address" } });
    const page = await open({ before: (page) => page.route("**/live", (route) => route.fulfill({ status: 403, contentType: "application/json", body })) });
    await page.waitForFunction(() => document.querySelector("#status").dataset.state === "refused", null, WAIT);
    await step("refused", { text: await page.locator("#status").textContent() });
    await page.unroute("**/live");
    await isLive(page);
    await step("live");
  },

  /** The field of a size that others change, with the focus in it. */
  async sizes() {
    const page = await open();
    await isLive(page);
    const pool = page.locator("[data-pool=decode]");
    const isOf = (size) => page.waitForFunction((text) => document.querySelector("[data-pool=decode] header .muted").textContent.includes(text), `of ${size} `, WAIT);
    const found = async () => ({ value: await pool.locator("input").inputValue(), resizes: await pool.locator("header button").isEnabled() });
    await pool.locator("input").focus();
    await isOf(await step("focused", await found()));
    await isOf(await step("followed", await found()));
    await pool.locator("input").fill("5");
    await isOf(await step("edited", await found()));
    await step("kept", await found());
  },

  /** A request every ten seconds: a chart whose values have no neighbours. */
  async sparse() {
    const page = await open({ before: (page) => page.addInitScript(() => {
      const { fetch } = window;
      const rewritten = () => {
        let text = "";
        return new TransformStream({ transform(chunk, controller) {
          text += chunk;
          const end = text.indexOf("\n\n");
          if (end < 0) return;
          const event = JSON.parse(text.slice(text.indexOf("{"), end));
          text = "";
          if (!event.snapshot) return;
          const now = Math.floor(event.snapshot.at);
          const point = (second) => [second, second % 10 ? {} : { ttft_p50_ms: 400 }];
          event.snapshot.points = Object.fromEntries(Array.from({ length: 280 }, (_, age) => point(now - 5 - age)));
          controller.enqueue(`data: ${JSON.stringify(event)}\n\n`);
        } });
      };
      window.fetch = async (path, ...others) => {
        const response = await fetch(path, ...others);
        if (path !== "live") return response;
        const events = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(rewritten());
        return new Response(events.pipeThrough(new TextEncoderStream()), response);
      };
    }) });
    await isLive(page);
    const drawn = await page.evaluate(async () => {
      await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
      const canvas = document.querySelector(".chart canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const isColored = (x) => Array.from({ length: canvas.height }, (_, y) => 4 * (y * canvas.width + x))
        .some((at) => data[at + 3] > 100 && Math.max(data[at], data[at + 1], data[at + 2]) - Math.min(data[at], data[at + 1], data[at + 2]) > 60);
      const columns = Array.from({ length: canvas.width }, (_, x) => isColored(x));
      return columns.filter((is, x) => is && !columns[x - 1]).length;
    });
    await step("drawn", { drawn, problems: page.problems });
  },

  /** By keys alone: the order of Tab with a visible focus, a resize, and a focus that stays where the table changes. */
  async keyboard() {
    const page = await open();
    await isLive(page);
    const stops = [];
    for (let number = 0; number < 40; number++) {
      await page.keyboard.press("Tab");
      const stop = await page.evaluate(() => {
        const { activeElement } = document;
        const { outlineStyle, outlineWidth } = getComputedStyle(activeElement);
        const isShown = outlineStyle !== "none" && parseFloat(outlineWidth) >= 1;
        const name = activeElement.getAttribute("aria-label") || activeElement.textContent;
        return activeElement === document.body ? null : [name.trim().slice(0, 40), isShown, activeElement.id];
      });
      if (!stop) break;
      stops.push(stop);
    }
    await step("walked", { stops });
    const focused = () => page.evaluate(() => document.activeElement.getAttribute("aria-label"));
    const walkTo = async (name) => {
      for (let number = 0; number < 40 && (await focused()) !== name; number++) await page.keyboard.press("Tab");
    };
    await walkTo("Size of the decode pool");
    await page.keyboard.press("ArrowUp");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("[data-pool=decode] tbody").length === 3, null, WAIT);
    await page.waitForFunction(() => document.querySelector("#decisions tbody"), null, WAIT);
    const decision = await page.locator("#decisions tbody td").allTextContents();
    await step("resized", { focused: await focused(), notice: await page.locator("#notice").textContent(), decision: decision.slice(1) });
    await walkTo("Drain decode-1");
    await page.keyboard.press("Enter");
    const asked = await focused();
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#notice").textContent.includes("drains"), null, WAIT);
    await step("drained", { asked, notice: await page.locator("#notice").textContent(), problems: page.problems });
  },

  /** When a load is seen: the argument is the number of its requests; the test's answer, when all of them ran. */
  async spike() {
    const page = await open({ before: (page) => page.addInitScript(() => {
      const { fetch } = window;
      window.updates = []; // when each event came
      const noted = new TransformStream({ transform(chunk, controller) {
        const num = new TextDecoder().decode(chunk).split("data: {").length - 1;
        window.updates.push(...Array(num).fill(Date.now()));
        controller.enqueue(chunk);
      } });
      window.fetch = async (path, ...others) => {
        const response = await fetch(path, ...others);
        return path === "live" ? new Response(response.body.pipeThrough(noted), response) : response;
      };
    }) });
    await isLive(page);
    await page.waitForFunction(() => window.updates.length > 2);
    await page.evaluate((size) => {
      const total = (name) => [...document.querySelectorAll("#totals div")].find((one) => one.querySelector("dt").textContent === name)?.querySelector("dd").textContent;
      const shown = {
        "in flight": () => total("in flight") === size,
        "TTFT": () => parseFloat(total("TTFT p50")) > 0,
        "tokens/s": () => parseFloat(total("tokens/s")) > 0,
        "chart of requests": () => [...document.querySelectorAll(".chart b")].some((one) => one.textContent === size),
        "running requests": () => document.querySelectorAll("#running tbody").length === Number(size),
      };
      window.seen = {};
      const look = () => {
        for (const [name, isShown] of Object.entries(shown)) if (!(name in window.seen) && isShown()) window.seen[name] = Date.now();
        window.isAllSeen = Object.keys(window.seen).length === Object.keys(shown).length;
      };
      new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
    }, folder);
    const running = Number(await step("calm"));
    await page.waitForFunction(() => window.isAllSeen);
    const { seen, updates } = await page.evaluate(() => ({ seen: window.seen, updates: window.updates }));
    const numUpdates = Math.max(...Object.values(seen).map((at) => updates.filter((one) => one > running && one <= at).length));
    await step("seen", { seen, numUpdates, problems: page.problems });
  },

  /** Names, reasons and errors that are markup, from everywhere: they must stay text. The markup comes as an argument. */
  async markup() {
    const page = await open({ before: async (page) => {
      const error = JSON.stringify({ error: { message: folder } });
      await page.route("**/pools/drain", (route) => route.fulfill({ status: 400, contentType: "application/json", body: error }));
      const piece = JSON.stringify({ choices: [{ delta: { content: folder } }] });
      await page.route("**/v1/chat/completions", (route) => route.fulfill({ contentType: "text/event-stream", headers: { "tandem-decode": folder }, body: `data: ${piece}\n\n` }));
    } });
    await isLive(page);
    await page.locator("#ended tbody button").first().evaluate((button) => button.click());
    const drain = page.locator("#pools tbody button").first();
    for (let click = 0; click < 2; click++) await drain.evaluate((button) => button.click());
    await page.locator("#chat-text").fill(folder);
    await page.locator("#chat-send").click();
    await page.waitForFunction((text) => document.querySelector(".message.assistant .note")?.textContent.includes(text), folder, WAIT);
    await page.waitForFunction((text) => document.querySelector("#notice").textContent === text, folder, WAIT);
    const found = await page.evaluate((text) => ({
      places: ["#model", "#pools", "#running", "#ended", ".facts", "#decisions", "#chat-log", "#notice", "title"].filter((one) => document.querySelector(one).textContent.includes(text)),
      elements: document.querySelectorAll("img, svg, iframe, body script, [onerror], [onload]").length,
      ran: Boolean(window.ran),
    }), folder);
    // 400 is the refusal of the drain, which the browser's console lists
    await step("shown", { ...found, problems: page.problems.filter((one) => !one.includes("status of 400")) });
  },

  /** Pictures for the docs and for the eye. */
  async pictures() {
    for (const [name, colorScheme, width, height] of [["light", "light", 1320, 800], ["dark", "dark", 1320, 1180], ["phone", "dark", 390, 844]]) {
      const page = await open({ colorScheme, width, height });
      await isLive(page);
      await page.locator("#ended tbody button").nth(2).evaluate((button) => button.click());
      await page.evaluate(() => scrollTo(0, 0));
      await page.waitForTimeout(2500);
      await page.screenshot({ path: `${folder}/page-${name}.png` });
      console.log(JSON.stringify({ step: name, problems: page.problems }));
      await page.context().close();
    }
  },
};

try {
  await scenarios[scenario]();
} finally {
  await browser.close();
  process.exit(process.exitCode ?? 0);
}
