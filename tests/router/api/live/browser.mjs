// The live page in a headless Chromium: `node browser.mjs SCENARIO URL`. Each step is one line of JSON; after it, the
// scenario goes on when a line comes in, so that the test can change what the page looks at.
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [scenario, url, folder] = process.argv.slice(2);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const WAIT = { timeout: 90_000 };

async function step(name, values = {}) {
  console.log(JSON.stringify({ step: name, ...values }));
  await lines.next();
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
  ],
});

async function open({ width = 1440, height = 1000, colorScheme = "light" } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme });
  const page = await context.newPage();
  page.setDefaultTimeout(WAIT.timeout);
  page.problems = [];
  page.on("console", (message) => message.type() === "error" && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(error.message));
  await page.goto(url);
  return page;
}

/** Reads the CPU time of the page's main thread, in seconds. */
async function cpuClock(page) {
  const client = await page.context().newCDPSession(page);
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  return async () => (await client.send("Performance.getMetrics")).metrics.find(({ name }) => name === "TaskDuration").value;
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
    const busy = await cpuClock(page);
    const before = await busy();
    await step("live", { rows, details: await page.locator("#ended .timeline li").count() });
    await step("watched", { cpu_s: (await busy()) - before, problems: page.problems });
    await page.waitForFunction(() => document.querySelector("#status").dataset.state === "lost", null, WAIT);
    await step("lost", { text: await page.locator("#status").textContent() });
    await isLive(page);
    const phone = await open({ width: 390, height: 844, colorScheme: "dark" });
    await isLive(phone);
    await step("again", { rows: await page.locator("#pools tbody").count(), scrolls: await isScrolling(phone) });
  },

  /** Without a token the page asks for it, and works with it. */
  async locked() {
    const page = await open();
    await page.locator("#access[open]").waitFor();
    await step("asked", { text: await page.locator("#access-problem").textContent() });
    await page.locator("#admin-token").fill("operators-token");
    await page.keyboard.press("Enter");
    await isLive(page);
    await step("live", {});
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
