//! `bench instructions`: counts the instructions that the gateway executes for a request and for an event,
//! and compares the counts with `tests/instructions.toml`.
//!
//! The load of the machine does not change a count, so a change of 2 % is visible, while CPU time differs by
//! a fifth from hour to hour. What the kernel does, and misses of caches, are not in a count.

use std::{collections::BTreeMap, fmt::Write as _, path::Path, process::Command, time::Duration};

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, sleep};

use super::{
    Programs,
    engines::Engines,
    routers::Router,
    scenario::{self, Scenario},
};
use crate::{fleet, load::Arrivals, sh};

mod callgrind;

use callgrind::Callgrind;

/// File with the expected counts.
const FILE: &str = "tests/instructions.toml";
/// Directory for the profiles of callgrind, one for each name: for `callgrind_annotate`.
const PROFILES: &str = "target/bench/instructions";
/// Part by which a count may differ from the expected one.
const TOLERANCE: f64 = 0.02;
/// The same for events. Timing decides how many of them the gateway reads and joins at once.
const TOLERANCE_OF_EVENTS: f64 = 0.06;
/// How long the gateway is counted without requests: probes of engines and timers continue during requests.
const IDLE: Duration = Duration::from_secs(4);
/// Configuration of the gateway. Valgrind has no address space for the default policies; `pointsman policy
/// bench` counts their instructions. Regular work, which depends on time, is rare.
const CONFIG: &str = "
[policies]
rescan = \"1h\"
slots.prefill.native = \"kv\"
slots.decode.native = \"kv\"
slots.aggregated.native = \"kv\"
[probe]
interval = \"1h\"
load_interval = \"1h\"
";
/// Numbers of events of the two kinds of streams whose difference is the cost of an event.
const STREAMS: [u32; 2] = [16, 64];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Counts to take by name [default: all].
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Write the counts to the file of expected counts instead of comparing.
    #[arg(long)]
    update: bool,
}

/// One count.
#[derive(Clone, Copy, Debug)]
struct Count {
    /// Name in the file.
    name: &'static str,
    scenario: &'static str,
    /// Number of counted requests. As many are sent before.
    requests: u64,
    per: Per,
}

#[derive(Clone, Copy, Debug)]
enum Per {
    Request,
    Event,
}

const COUNTS: [Count; 5] = [
    Count { name: "request-a", scenario: "a", requests: 800, per: Per::Request },
    Count { name: "request-d", scenario: "d", requests: 100, per: Per::Request },
    Count { name: "request-e", scenario: "e", requests: 300, per: Per::Request },
    Count { name: "event-b", scenario: "b", requests: 200, per: Per::Event },
    Count { name: "event-c", scenario: "c", requests: 16, per: Per::Event },
];

/// Counts, and compares or writes the counts.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let names = COUNTS.map(|count| count.name);
    for name in &args.only {
        ensure!(names.contains(&name.as_str()), "no count is called `{name}`: expected {}", names.join(", "));
    }
    let bin = fleet::build("release")?.canonicalize()?;
    let profiles = sh::root().join(PROFILES);
    let mut counts = BTreeMap::new();
    let wanted = |one: &&Count| args.only.is_empty() || args.only.iter().any(|name| name == one.name);
    for count in COUNTS.iter().filter(wanted) {
        let taken = count.take(&bin, &profiles).await.with_context(|| count.name.to_owned())?;
        sh::status(&format!("{} {taken:.0}", count.name));
        counts.insert(count.name.to_owned(), taken);
    }
    let file = sh::root().join(FILE);
    if args.update {
        return update(&file, &counts, &versions());
    }
    let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    compare(&text, &counts, &versions())
}

impl Count {
    async fn take(&self, bin: &Path, profiles: &Path) -> anyhow::Result<f64> {
        match self.per {
            Per::Request => self.of_requests(None, bin, profiles).await,
            Per::Event => {
                let [few, many] = STREAMS;
                let cost_of_few = self.of_requests(Some(few), bin, profiles).await?;
                let cost_of_many = self.of_requests(Some(many), bin, profiles).await?;
                Ok((cost_of_many - cost_of_few) / f64::from(many - few))
            }
        }
    }

    /// Returns the number of instructions of a request whose stream has so many events. One client sends the
    /// requests one after another, so that every request finds the same gateway.
    async fn of_requests(&self, events: Option<u32>, bin: &Path, profiles: &Path) -> anyhow::Result<f64> {
        let chosen = scenario::choose(&[self.scenario], false)?.remove(0);
        let scenario = Scenario {
            load: Arrivals::Clients(1),
            events: events.unwrap_or(chosen.events),
            requests: self.requests,
            ..chosen
        };
        let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
        let engines = Engines::start(&scenario, bin, dir.path())?;
        let bin = callgrind::wrapper(bin, dir.path())?;
        let programs = Programs { bin, config: CONFIG, ..Programs::default() };
        let router = Router::Pointsman.start(&scenario, &engines, &programs).await?;
        let callgrind = Callgrind::new(router.pid().context("the gateway has no process")?, dir.path());
        super::run::run(&scenario, &router, 1.0).await?;
        callgrind.count_from_now()?;
        sleep(IDLE).await;
        let idle_per_second = callgrind.counted()? / IDLE.as_secs_f64();
        let begun = Instant::now();
        super::run::run(&scenario, &router, 1.0).await?;
        let all = callgrind.counted()?;
        let idle = idle_per_second * begun.elapsed().as_secs_f64();
        std::fs::create_dir_all(profiles)?;
        callgrind.keep(&profiles.join(format!("{}.out", self.name)))?;
        Ok((all - idle) / self.requests as f64)
    }
}

/// Writes the file of expected counts. Counts that were not taken stay.
fn update(file: &Path, counts: &BTreeMap<String, f64>, versions: &str) -> anyhow::Result<()> {
    let mut expected = std::fs::read_to_string(file).map_or(Ok(Expected::default()), |text| read(&text))?;
    versions.clone_into(&mut expected.versions);
    expected.counts.extend(counts.iter().map(|(name, count)| (name.clone(), count.round())));
    std::fs::write(file, expected.text()).with_context(|| file.display().to_string())?;
    sh::print(&format!("wrote {}", file.display()));
    Ok(())
}

/// Prints a table, and returns an error if a count differs too much from the expected one.
fn compare(text: &str, counts: &BTreeMap<String, f64>, versions: &str) -> anyhow::Result<()> {
    let expected = read(text)?;
    let mut wrong = Vec::new();
    sh::print(&format!("{:<12} {:>12} {:>12} {:>8}", "count", "expected", "counted", "ratio"));
    for (name, counted) in counts {
        let of_file = expected.counts.get(name);
        let of_file = of_file.with_context(|| format!("{FILE} has no `{name}`: run with --update"))?;
        let ratio = counted / of_file;
        sh::print(&format!("{name:<12} {of_file:>12.0} {counted:>12.0} {ratio:>8.3}"));
        let tolerance = if name.starts_with("event-") { TOLERANCE_OF_EVENTS } else { TOLERANCE };
        if (ratio - 1.0).abs() > tolerance {
            wrong.push(format!("{name} {ratio:.3}"));
        }
    }
    let mut advice =
        "find the change that moved them, or run with --update and say why in the commit".to_owned();
    if expected.versions != versions {
        write!(advice, "; expected with {}, counted with {versions}", expected.versions)?;
    }
    ensure!(wrong.is_empty(), "counts differ too much from {FILE}: {}; {advice}", wrong.join(", "));
    Ok(())
}

/// Content of the file.
#[derive(Debug, Default, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    /// Programs that determine the counts, besides the sources.
    versions: String,
    counts: BTreeMap<String, f64>,
}

impl Expected {
    fn text(&self) -> String {
        let mut text = format!(
            "# Instructions in user space of a request or an event, by scenario of `cargo xtask bench gateway`.\n\
             # `cargo xtask bench instructions` holds them within 2 % (events: 6 %); `--update` writes this file.\n\
             versions = {:?}\n\n[counts]\n",
            self.versions
        );
        for (name, count) in &self.counts {
            text.push_str(&format!("{name} = {count:.1}\n"));
        }
        text
    }
}

fn read(text: &str) -> anyhow::Result<Expected> {
    toml::from_str(text).context(FILE)
}

/// Returns the versions of the compiler, the C library and valgrind.
fn versions() -> String {
    let first_words = |program: &str, args: &[&str]| {
        let text = sh::output(Command::new(program).args(args).current_dir(sh::root())).unwrap_or_default();
        text.split_whitespace().take(2).collect::<Vec<_>>().join(" ")
    };
    let c_library = first_words("getconf", &["GNU_LIBC_VERSION"]);
    [first_words("rustc", &["--version"]), c_library, first_words("valgrind", &["--version"])].join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(a: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("request-a".to_owned(), a)])
    }

    #[test]
    fn a_count_may_differ_by_two_percent_in_both_directions() {
        let expected = Expected { versions: "v1".to_owned(), counts: counts(1_000.0) }.text();
        assert_eq!(read(&expected).unwrap().counts, counts(1_000.0));
        for allowed in [981.0, 1_000.0, 1_019.0] {
            compare(&expected, &counts(allowed), "v1").unwrap();
        }
        for (count, ratio) in [(979.0, "0.979"), (1_021.0, "1.021")] {
            let error = compare(&expected, &counts(count), "v1").unwrap_err().to_string();
            assert!(error.contains(&format!("request-a {ratio}; find the change")), "{error}");
            assert!(!error.contains("expected with"), "{error}");
        }
        let error = compare(&expected, &counts(1.0), "v2").unwrap_err().to_string();
        assert!(error.contains("expected with v1, counted with v2"), "{error}");
        let unknown = BTreeMap::from([("request-z".to_owned(), 1.0)]);
        let error = compare(&expected, &unknown, "v1").unwrap_err().to_string();
        assert_eq!(error, "tests/instructions.toml has no `request-z`: run with --update");
    }

    #[test]
    fn an_update_keeps_counts_that_were_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("counts.toml");
        update(&file, &counts(1.4), "v1").unwrap();
        let more = BTreeMap::from([("event-b".to_owned(), 7.0)]);
        update(&file, &more, "v2").unwrap();
        let expected = read(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(expected.versions, "v2");
        assert_eq!(
            expected.counts.into_iter().collect::<Vec<_>>(),
            [("event-b".to_owned(), 7.0), ("request-a".to_owned(), 1.0)]
        );
    }

    #[test]
    fn every_count_is_of_a_scenario_and_in_the_file() {
        let file = std::fs::read_to_string(sh::root().join(FILE)).unwrap();
        let mut names: Vec<&str> = COUNTS.iter().map(|count| count.name).collect();
        names.sort_unstable();
        assert!(read(&file).unwrap().counts.keys().eq(names));
        for count in COUNTS {
            scenario::choose(&[count.scenario], false).unwrap();
        }
    }
}
