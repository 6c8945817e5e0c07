// Drives the page in Chromium as an operator would. Prints the name of each step it is ready for and checks the page.
// Arguments: the admin listener's URL, the path of Chromium, the folder of screenshots, the admin token.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

import { measure } from "./scale.mjs";

const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const [url, executablePath, pictures, token] = process.argv.slice(2);
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath, args, headless: true });
const step = (name) => console.log(name);
const problems = [];
const WIDTHS = [1280, 768, 390];
const HOSTILE = ["<img src=x onerror=alert(1)>", "<script>alert(2)</script>"];

/** Shows a view, which is a part of the address. */
const open = async (page, view) => {
  await page.evaluate((hash) => { location.hash = hash; }, view);
  await page.locator("main .card").first().waitFor();
};
const wide = (page) => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
/** Cards with a content that is wider than they are. */
const spilt = (page) => page.evaluate(() => [...document.querySelectorAll(".card")].filter((card) => card.scrollWidth > card.clientWidth + 1).map((card) => card.textContent.slice(0, 40)));
const picture = (page, name, more) => page.screenshot({ path: `${pictures}/${name}.png`, ...more });

try {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: "light" });
  const page = await context.newPage();
  page.setDefaultTimeout(30000);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("dialog", (dialog) => { problems.push(`a dialog: ${dialog.message()}`); dialog.dismiss(); });
  await page.addInitScript(() => {
    window.violations = [];
    document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
    window.loaded = Math.random();
  });
  await page.goto(url);
  await page.locator("#state", { hasText: "live" }).waitFor();
  const loaded = await page.evaluate(() => window.loaded);

  // Without the token, or with a wrong one, the page is read-only.
  await open(page, "slot/prefill");
  assert.equal(await page.getByRole("button", { name: "…" }).count(), 0);
  await page.locator("#give").click();
  await page.locator("#secret").fill("nonsense");
  await page.keyboard.press("Enter");
  await page.locator("#refused", { hasText: "wrong token" }).waitFor();
  await page.locator("#secret").fill(token);
  await page.keyboard.press("Enter");
  await page.locator("#forget").waitFor();

  // Requests, one row each; a swapped policy decides, and trials are compared.
  step("requests");
  for (const unknown of ["slots", "constructor", "overview"]) {
    await open(page, unknown);
    await page.waitForURL("**/#overview");
  }
  const rows = page.locator(".requests tbody tr");
  await rows.locator(".st.ok").first().waitFor();
  const slots = page.locator("table.slots tbody tr");
  const prefill = slots.filter({ has: page.locator("a", { hasText: /^prefill$/ }) });
  const generation = async () => Number((await prefill.locator(".policy").textContent()).match(/@(\d+)/)[1]);
  const before = await generation();
  step("swap");
  await prefill.locator(".policy", { hasText: "weighted-random" }).waitFor();
  const after = await generation();
  assert(after > before, `${before} ${after}`);
  step("trials");
  await prefill.getByText("agrees").waitFor();
  step("garbage");
  await page.locator(".problems", { hasText: "A policy file was refused" }).waitFor();
  await page.locator(".log", { hasText: "file refused: not wasm" }).waitFor();

  // Every view fits every width, with the outcome of each request inside the window.
  await rows.locator(".st.ok").nth(3).waitFor();
  const first = await rows.locator("a.hit").nth(4).getAttribute("href");
  for (const width of WIDTHS) {
    await page.setViewportSize({ width, height: width < 500 ? 844 : 900 });
    for (const view of ["overview", "fleet", "slot/prefill", "worker/2", first.slice(1)]) {
      await open(page, view);
      await page.waitForTimeout(1500);
      assert.deepEqual(await spilt(page), [], `of ${view} at ${width}, these stand out of their cards`);
      assert((await wide(page)) <= 0, `${view} is ${await wide(page)} pixels wider than ${width}`);
      await picture(page, `${view.split("/")[0]}-${width}`, { fullPage: true });
    }
    await open(page, "overview");
    const box = await rows.locator(".st").first().boundingBox();
    assert(box.x >= 0 && box.x + box.width <= width, `the outcome is outside at ${width}: ${JSON.stringify(box)}`);
    const strip = await rows.locator(".flow:visible").first().boundingBox();
    assert(strip.width > 0, "the timeline of a request is visible");
  }
  await page.setViewportSize({ width: 1280, height: 900 });

  // A number explains itself when the pointer is on it.
  await page.locator(".signal .tip", { hasText: "Requests" }).hover();
  await page.locator("#tip", { hasText: "the mean of the last minute" }).waitFor();
  await page.mouse.move(2, 2);
  await page.locator("#tip").waitFor({ state: "hidden" });

  // With the keyboard only: from the overview to a request, its receipts, and their JSON.
  await page.locator("#skip").focus();
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "main");
  await rows.locator("a.hit").nth(5).focus();
  await page.getByText("held while you look").waitFor();
  await page.keyboard.press("Enter");
  await page.locator("h2", { hasText: "Prefill leg" }).waitFor();
  await page.getByText("was chosen").first().waitFor();
  assert((await page.locator(".candidates .pick").count()) >= 1, "the chosen candidate is marked");
  assert((await page.locator(".timeline .track").count()) >= 3, "queue, prefill, transfer, decode");
  await page.locator("details summary").focus();
  await page.keyboard.press("Enter");
  await page.locator("pre", { hasText: '"request_id"' }).first().waitFor();
  await page.locator(".candidates a").first().focus();
  await page.keyboard.press("Enter");
  await page.locator("h2", { hasText: "Why legs come here" }).waitFor();
  await page.locator("h2", { hasText: "Ranks" }).waitFor();

  // Pictures of the page in use, light and dark.
  await open(page, "overview");
  // The charts have one point a minute.
  const drawn = () => (document.querySelector(".spark .line0")?.getAttribute("d") ?? "").split("L").length > 3;
  await page.waitForFunction(drawn, null, { timeout: 300000 });
  await page.setViewportSize({ width: 1280, height: 1180 });
  await page.waitForTimeout(1500);
  await picture(page, "page");
  await page.emulateMedia({ colorScheme: "dark" });
  await picture(page, "dark");
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 1280, height: 1120 });

  // The lanes of a slot side by side.
  await open(page, "slot/prefill");
  const lanes = page.locator("table.lanes");
  await lanes.locator("th", { hasText: "shadow" }).waitFor();
  const row = (name) => lanes.locator("tbody tr", { has: page.locator("td:first-child", { hasText: name }) }).locator("td").allTextContents();
  await lanes.locator("td", { hasText: /\d\s%/ }).first().waitFor();
  assert((await row("agreement"))[3].includes("%"), (await row("agreement")).join());
  const [, active, , shadow] = await row("TTFT p50");
  assert(/\d/.test(active) && !/\d/.test(shadow), `nothing is measured of a shadow: ${active} ${shadow}`);
  assert((await page.locator("svg.plot path.lane").count()) >= 1);
  await page.locator(".files", { hasText: "refused" }).getByText("not WebAssembly").waitFor();
  await page.waitForTimeout(6000);
  await picture(page, "compare");
  await page.setViewportSize({ width: 1280, height: 900 });

  // Markup from a hostile policy, client or file is shown as text, in every view.
  step("markup");
  await open(page, "overview");
  await page.locator(".problems, .log", { hasText: "<img src=x>.wasm" }).first().waitFor();
  await page.locator("input[type=search]").fill("onerror");
  await rows.locator("a.hit").first().waitFor();
  const hostile = await rows.locator("a.hit").first().getAttribute("href");
  await page.locator("input[type=search]").fill("nothing like this");
  await rows.getByText("no request matches the filter").waitFor();
  await page.locator("input[type=search]").fill("");
  await open(page, hostile.slice(1));
  await page.locator("h1", { hasText: HOSTILE[1] }).waitFor();
  await page.locator(".say", { hasText: HOSTILE[0] }).first().waitFor();
  await picture(page, "receipt", { fullPage: true });
  await open(page, "slot/decode");
  await page.locator(".files", { hasText: "<img src=x>.wasm" }).waitFor();
  for (const view of ["overview", "fleet", "slot/decode", "worker/4", hostile.slice(1)]) {
    await open(page, view);
    await page.waitForTimeout(700);
    assert.equal(await page.locator("main img, main script, dialog img, dialog script").count(), 0, view);
  }

  // Commands say what will change and need a confirmation. Cancel has the focus.
  await open(page, "slot/prefill");
  const active_ = lanes.locator("th[data-lane=active] .name"), ask = page.locator("#ask");
  await page.getByRole("button", { name: "Roll back" }).focus();
  await page.keyboard.press("Enter");
  await ask.getByText("serves again, as a new generation").waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Cancel");
  await page.keyboard.press("Enter");
  assert((await active_.textContent()).includes(`@${after}`), "nothing was changed");
  await page.getByRole("button", { name: "Roll back" }).click();
  await picture(page, "rollback");
  await page.locator("#yes").click();
  await page.locator(".log li", { hasText: "rolled back" }).first().waitFor();
  await lanes.locator("th[data-lane=canary]").getByRole("button", { name: "Promote" }).click();
  await page.locator("#yes").click();
  await page.locator(".log li", { hasText: "promoted" }).first().waitFor();
  assert.equal(await page.evaluate(() => window.loaded), loaded, "the page was never loaded again");
  problems.push(...(await page.evaluate(() => window.violations)));

  // When reads need the token, the page asks for it and continues. The browser itself reports the 401.
  const strict = await context.newPage();
  await strict.route("**/events?*", (route) =>
    route.request().headers().authorization ? route.continue() : route.fulfill({ status: 401, body: "{}" }));
  await strict.goto(url);
  await strict.locator("#state", { hasText: "token required" }).waitFor();
  await strict.locator("#secret").fill(token);
  await strict.keyboard.press("Enter");
  await strict.locator(".requests tbody .st").first().waitFor();
  await strict.close();

  // 1,000 workers and 200 requests a second.
  for (const line of await measure(context, url, pictures)) console.log(line);

  // A gateway that is away leaves what is shown, with its time.
  await open(page, "worker/2");
  await page.locator("h2", { hasText: "Ranks" }).waitFor();
  step("end");
  await page.locator("#state", { hasText: "disconnected" }).waitFor();
  await page.getByText("What is shown is as of").waitFor();
  await page.locator("h2", { hasText: "Ranks" }).waitFor();
  // The browser reports the lost connection, and may report nothing else.
  const ours = problems.filter((text) => !/net::ERR_(CONNECTION|INCOMPLETE)/.test(text));
  assert.deepEqual(ours, []);
  step("done");
} finally {
  await browser.close();
}
