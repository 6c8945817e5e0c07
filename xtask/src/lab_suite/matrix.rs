//! The cells of the matrix: combinations of traffic and fleet. This module reads files and uses no results.

use std::{fmt::Write as _, path::Path, process::Command};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::lookalike::{self, Lookalike};
use crate::sh;

/// Number of tokens that the cache of an engine holds.
const CACHE_TOKENS: u32 = 524_288;
/// Number of tokens in a block of `trace generate`. Traces of agents have Mooncake's size of blocks.
const SMALL_BLOCK: u32 = 64;
/// Step time of equal engines and of fast ones, and step time of engines that take twice as long.
const LINEAR: [&str; 2] = [
    "{ linear = { c0 = 6.0, c1 = 0.02, c2 = 0.00005, c3 = 0.02, c4 = 0.0 } }",
    "{ linear = { c0 = 12.0, c1 = 0.04, c2 = 0.0001, c3 = 0.04, c4 = 0.0 } }",
];

/// Content of `matrix.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Matrix {
    cell: Vec<Cell>,
}

/// One combination of traffic and fleet. `matrix.toml` explains the keys.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Cell {
    pub(super) name: String,
    pub(super) traffic: Traffic,
    requests: u32,
    engines: String,
    step_time: String,
    sequences: u32,
    #[serde(default)]
    unequal: bool,
    scrape_ms: u32,
    #[serde(default = "yes")]
    kv_events: bool,
    pub(super) load: f64,
    #[serde(default)]
    pub(super) quick: bool,
}

/// Kind of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Traffic {
    Chat,
    SystemPrompts,
    Documents,
    Conversation,
    Synthetic,
    Agents,
}

fn yes() -> bool {
    true
}

/// Reads the cells of a file.
///
/// # Errors
/// The file is not readable, or a cell is not valid.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Cell>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let matrix: Matrix = toml::from_str(&text).with_context(|| path.display().to_string())?;
    for cell in &matrix.cell {
        cell.fleet().with_context(|| format!("{}, cell {}", path.display(), cell.name))?;
    }
    Ok(matrix.cell)
}

impl Cell {
    /// Returns the rate of `trace generate` with which the search for the capacity begins.
    pub(super) fn start_rate(&self) -> anyhow::Result<f64> {
        let each = if self.traffic == Traffic::Agents { 0.02 } else { 1.0 };
        self.engine_count().map(|count| each * f64::from(count))
    }

    /// Returns the number of aggregated engines, or the numbers of prefill and of decode engines.
    fn counts(&self) -> anyhow::Result<(u32, Option<u32>)> {
        let parsed = match self.engines.split_once('+') {
            Some((prefill, decode)) => prefill.parse().and_then(|one| Ok((one, Some(decode.parse()?)))),
            None => self.engines.parse().map(|count| (count, None)),
        };
        parsed.with_context(|| format!("engines = \"{}\": expected \"8\" or \"4+4\"", self.engines))
    }

    fn engine_count(&self) -> anyhow::Result<u32> {
        self.counts().map(|(first, second)| first + second.unwrap_or(0))
    }

    /// Whether prefill and decode run on different engines.
    pub(super) fn is_disaggregated(&self) -> bool {
        self.engines.contains('+')
    }

    /// Returns the number of tokens in a block of the trace and of the engines.
    pub(super) fn block_tokens(&self) -> u32 {
        match self.traffic {
            Traffic::Chat | Traffic::SystemPrompts | Traffic::Documents => SMALL_BLOCK,
            Traffic::Conversation | Traffic::Synthetic | Traffic::Agents => lookalike::BLOCK,
        }
    }

    /// Returns the text of the fleet file.
    pub(super) fn fleet(&self) -> anyhow::Result<String> {
        let (first, second) = self.counts()?;
        ensure!(!self.unequal || self.step_time == "linear", "unequal engines need step-time = \"linear\"");
        let block = self.block_tokens();
        let mut text = format!(
            "block_tokens = {block}\nscrape_interval_ms = {}\nkv_events = {}\n",
            self.scrape_ms, self.kv_events
        );
        let groups = match second {
            None => vec![("aggregated", first)],
            Some(second) => vec![("prefill", first), ("decode", second)],
        };
        for (role, count) in groups {
            ensure!(!self.unequal || count % 2 == 0, "unequal engines need an even number of each role");
            let speeds = if self.unequal { 2 } else { 1 };
            for slowness in 0..speeds {
                let blocks = CACHE_TOKENS / block;
                let step_time = if self.step_time == "linear" {
                    LINEAR.get(slowness).copied().unwrap_or_default().to_owned()
                } else {
                    format!("\"{}\"", self.step_time)
                };
                writeln!(
                    text,
                    "[[engines]]\nrole = \"{role}\"\ncount = {}\nmax_num_seqs = {}\n\
                     blocks = {blocks}\nstep_time = {step_time}",
                    count as usize / speeds,
                    self.sequences
                )?;
            }
        }
        Ok(text)
    }

    /// Writes the trace of a seed to a file.
    ///
    /// # Errors
    /// The file cannot be written, or `trace generate` fails.
    pub(super) fn trace(&self, lab: &Path, seed: u64, rate: f64, to: &Path) -> anyhow::Result<()> {
        if let Some(kind) = self.lookalike() {
            return Ok(std::fs::write(to, kind.generate(self.requests as usize, rate, seed)?)?);
        }
        let shape = match self.traffic {
            Traffic::SystemPrompts => "system-prompts",
            Traffic::Documents => "documents",
            Traffic::Agents => "agents",
            _ => "chat",
        };
        let mut command = Command::new(lab);
        command.args(["trace", "generate", shape, "--requests", &self.requests.to_string()]);
        command.args(["--rate", &rate.to_string(), "--seed", &seed.to_string(), "-o"]).arg(to);
        sh::output(&mut command).map(drop)
    }

    fn lookalike(&self) -> Option<&'static Lookalike> {
        match self.traffic {
            Traffic::Conversation => Some(&lookalike::CONVERSATION),
            Traffic::Synthetic => Some(&lookalike::SYNTHETIC),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_matrix_has_the_promised_breadth() {
        let cells = read(&sh::root().join(super::super::MATRIX)).unwrap();
        let count = |which: &dyn Fn(&Cell) -> bool| cells.iter().filter(|cell| which(cell)).count();
        let names: BTreeSet<&str> = cells.iter().map(|cell| cell.name.as_str()).collect();
        assert_eq!(names.len(), cells.len(), "two cells share a name");
        assert!(cells.len() >= 40, "{}", cells.len());
        assert_eq!(count(&|cell| cell.quick), 12);
        let traffic: BTreeSet<Traffic> = cells.iter().map(|cell| cell.traffic).collect();
        assert_eq!(traffic.len(), 6);
        let steps: BTreeSet<&str> = cells.iter().map(|cell| cell.step_time.as_str()).collect();
        assert!(steps.len() >= 3, "{steps:?}");
        for kind in traffic {
            let of = |which: &dyn Fn(&Cell) -> bool| count(&|cell| cell.traffic == kind && which(cell));
            assert!(of(&Cell::is_disaggregated) > 0 && of(&|cell| !cell.is_disaggregated()) > 0, "{kind:?}");
            assert!(
                of(&|cell| cell.scrape_ms >= 5_000) > 0 && of(&|cell| cell.scrape_ms < 1_000) > 0,
                "{kind:?}"
            );
            assert!(of(&|cell| !cell.kv_events) > 0 || kind == Traffic::Documents, "{kind:?}");
        }
        let loads = || cells.iter().map(|cell| cell.load);
        assert!(loads().any(|load| load <= 0.3) && loads().any(|load| load >= 0.95));
        assert!(loads().all(|load| (0.3..=0.95).contains(&load)));
        let engines = || cells.iter().map(|cell| cell.engine_count().unwrap());
        assert!(engines().any(|count| count == 64) && engines().all(|count| (2..=64).contains(&count)));
        assert!(count(&|cell| cell.unequal) >= 4);
    }

    #[test]
    fn a_fleet_file_has_the_engines_of_the_cell() {
        let cell = |engines: &str, step: &str, unequal: bool| -> anyhow::Result<String> {
            let text = format!(
                "name = \"x\"\ntraffic = \"synthetic\"\nrequests = 1\nengines = \"{engines}\"\nstep-time = \"{step}\"\n\
                 sequences = 64\nunequal = {unequal}\nscrape-ms = 5000\nload = 0.5\n"
            );
            let cell: Cell = toml::from_str(&text)?;
            cell.fleet()
        };
        let fleet = cell("2+4", "linear", true).unwrap();
        assert!(
            fleet.starts_with("block_tokens = 512\nscrape_interval_ms = 5000\nkv_events = true\n"),
            "{fleet}"
        );
        let counts: Vec<&str> = fleet.lines().filter(|line| line.starts_with("count")).collect();
        assert_eq!(counts, ["count = 1", "count = 1", "count = 2", "count = 2"]);
        assert!(fleet.contains("c0 = 12.0"), "{fleet}");
        assert!(
            cell("3", "dynamo", false)
                .unwrap()
                .contains("count = 3\nmax_num_seqs = 64\nblocks = 1024\nstep_time = \"dynamo\"")
        );
        let error = |engines, step| cell(engines, step, true).unwrap_err().to_string();
        assert_eq!(error("8", "dynamo"), "unequal engines need step-time = \"linear\"");
        assert_eq!(error("3", "linear"), "unequal engines need an even number of each role");
        assert_eq!(error("x", "linear"), "engines = \"x\": expected \"8\" or \"4+4\"");
    }
}
