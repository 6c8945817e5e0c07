// Drives the page in Chromium as an operator would. Prints the name of each step it is ready for and checks the page.
// Arguments: the admin listener's URL, the path of Chromium, the folder of screenshots, the admin token.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const [url, executablePath, pictures, token] = process.argv.slice(2);
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath, args, headless: true });
const step = (name) => console.log(name);
const problems = [];

try {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, colorScheme: "light" });
  const page = await context.newPage();
  page.setDefaultTimeout(20000);
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
  assert.equal(await page.locator(".slot button").count(), 0);
  await page.locator("#give").click();
  await page.locator("#secret").fill("nonsense");
  await page.keyboard.press("Enter");
  await page.locator("#refused", { hasText: "wrong token" }).waitFor();
  await page.locator("#secret").fill(token);
  await page.keyboard.press("Enter");
  await page.locator("#reload").waitFor();

  step("requests");
  await page.locator("#decisions tr td button").first().waitFor();
  const slot = page.locator(".slot", { has: page.locator("h3", { hasText: /^prefill/ }) });
  const generation = async () => Number((await slot.textContent()).match(/generation (\d+)/)[1]);
  const before = await generation();
  step("swap");
  await slot.locator(".policy", { hasText: "weighted-random" }).waitFor();
  const after = await generation();
  assert(after > before, `${before} ${after}`);
  await page.locator("#decisions tr", { hasText: `weighted-random @${after}` }).first().waitFor();
  await slot.getByText("grants: log, wasi").waitFor();
  step("trials");
  await slot.getByText("agrees in").waitFor();
  step("garbage");
  await slot.locator("summary", { hasText: "not_wasm" }).waitFor();
  await page.locator("#history", { hasText: "refused" }).waitFor();

  // The page fits the window; take the screenshot.
  await page.waitForTimeout(1500);
  const wide = () => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert((await wide()) <= 0, "wider than 1280");
  await page.screenshot({ path: `${pictures}/page.png` });

  // The Compare view has active, canary and shadow side by side, with plots of what was measured.
  const opener = page.locator("#show-compare");
  await opener.click();
  assert.equal(await opener.getAttribute("aria-expanded"), "true");
  const lanes = page.locator("#lanes .lanes", { has: page.locator("h3", { hasText: /^prefill/ }) });
  await lanes.locator("th", { hasText: "shadow" }).waitFor();
  assert.deepEqual(await lanes.locator("thead th.n").allTextContents(), ["active", "canary", "shadow"]);
  const row = (name) => lanes.locator("tbody tr", { has: page.locator("th", { hasText: name }) }).locator("td").allTextContents();
  assert((await row("agrees"))[2].includes("%"), (await row("agrees")).join());
  const [active, , shadow] = await row("TTFT p50");
  assert(/\d/.test(active) && !/\d/.test(shadow), `nothing is measured of a shadow: ${active} ${shadow}`);
  assert((await lanes.locator("figure polyline").count()) >= 3);
  assert((await wide()) <= 0, "the Compare view is wider than 1280");
  await page.screenshot({ path: `${pictures}/compare.png`, fullPage: true });
  await opener.click();
  assert(await page.locator("#compare").isHidden());

  // Markup from a hostile policy or client is shown as text.
  step("markup");
  await page.locator("#decisions tr", { hasText: "<img src=x onerror=alert(1)>" }).first().waitFor();
  await page.locator("#history", { hasText: "<img src=x>.wasm" }).waitFor();
  await page.locator("#filter").fill("onerror hostile");
  await page.locator("#shown", { hasText: "of the newest" }).waitFor();
  await page.locator("#decisions tr td button").first().focus();
  await page.keyboard.press("Enter");
  await page.locator("#json", { hasText: "<img src=x onerror=alert(1)>" }).waitFor();
  await page.locator("#json", { hasText: "<script>alert(2)</script>" }).waitFor();
  await page.screenshot({ path: `${pictures}/receipt.png` });
  await page.keyboard.press("Escape");
  assert.equal(await page.locator("main img, main script, dialog img, dialog script").count(), 0);
  await page.locator("#filter").fill("nothing like this");
  await page.locator("#decisions td.none").waitFor();
  await page.locator("#filter").fill("");

  await page.waitForTimeout(500);
  await page.emulateMedia({ colorScheme: "dark" });
  await page.screenshot({ path: `${pictures}/dark.png` });
  await page.setViewportSize({ width: 390, height: 844 });
  assert((await wide()) <= 0, `${await wide()} pixels wider than a phone`);
  await page.screenshot({ path: `${pictures}/phone.png`, fullPage: true });
  await page.setViewportSize({ width: 1280, height: 800 });

  // Commands need a confirmation.
  await slot.getByRole("button", { name: "Roll back" }).click();
  await page.locator("#confirm").getByText("Cancel").click();
  assert.equal(await generation(), after);
  await slot.getByRole("button", { name: "Roll back" }).click();
  await page.locator("#yes").click();
  await page.locator("#history li", { hasText: "rolled back" }).first().waitFor();
  await slot.getByRole("button", { name: "Promote canary" }).click();
  await page.locator("#yes").click();
  await page.locator("#history li", { hasText: "promoted" }).first().waitFor();
  assert.equal(await page.evaluate(() => window.loaded), loaded, "the page was never loaded again");
  problems.push(...(await page.evaluate(() => window.violations)));

  // When reads need the token, the page asks for it and continues. The browser itself reports the 401.
  const strict = await context.newPage();
  await strict.route("**/events", (route) =>
    route.request().headers().authorization ? route.continue() : route.fulfill({ status: 401, body: "{}" }));
  await strict.goto(url);
  await strict.locator("#state", { hasText: "token required" }).waitFor();
  await strict.locator("#secret").fill(token);
  await strict.keyboard.press("Enter");
  await strict.locator("#decisions tr td button").first().waitFor();

  step("end");
  await page.locator("#state", { hasText: "disconnected" }).waitFor();
  // The browser reports the lost connection, and may report nothing else.
  const ours = problems.filter((text) => !/net::ERR_(CONNECTION|INCOMPLETE)/.test(text));
  assert.deepEqual(ours, []);
  step("done");
} finally {
  await browser.close();
}
