//! Description of a simulated engine and the `--worker` flag that registers it.

use std::{path::Path, process::Command};

use serde_json::Value;

use super::Process;

/// One simulated engine.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    dialect: String,
    /// `prefill`, `decode` or `aggregated`.
    pub role: String,
    flags: Vec<String>,
    /// Appended to the `--worker` flag, after a comma.
    pub worker: String,
}

impl EngineSpec {
    /// Describes an engine. `flags` are flags of `pointsman-sim`, separated by spaces.
    pub fn new(dialect: &str, role: &str, flags: &str) -> Self {
        Self {
            dialect: dialect.to_owned(),
            role: role.to_owned(),
            flags: flags.split_whitespace().map(str::to_owned).collect(),
            worker: String::new(),
        }
    }

    /// Appends fields to the `--worker` flag.
    pub fn worker(mut self, fields: &str) -> Self {
        self.worker = if fields.is_empty() { String::new() } else { format!(",{fields}") };
        self
    }

    /// Name of the engine's process and log file; `place` counts from 1.
    pub fn name(&self, place: usize) -> String {
        format!("{}-{}-{place}", self.dialect, self.role)
    }

    /// Starts the engine from a directory of programs, on a free port; `place` counts from 1.
    pub fn start(&self, bin: &Path, dir: &Path, place: usize) -> anyhow::Result<Process> {
        self.start_at(bin, dir, place, "127.0.0.1:0")
    }

    /// Starts the engine at an address.
    pub fn start_at(&self, bin: &Path, dir: &Path, place: usize, listen: &str) -> anyhow::Result<Process> {
        let mut command = engine(bin);
        command.args(["--listen", listen, "--bootstrap-port", "0"]);
        command.args(["--engine", &self.dialect, "--role", &self.role]).args(&self.flags);
        Process::announcing(&self.name(place), command, dir)
    }

    /// Makes the `--worker` flag of an engine that announced its ports.
    pub fn worker_flag(&self, place: usize, announced: &Value) -> String {
        let url = announced["listening"].as_str().unwrap_or_default();
        let mut flag =
            format!("id={place},role={},engine={},url=http://{url}{}", self.role, self.dialect, self.worker);
        if let (Some(port), "sglang", "prefill") =
            (announced["bootstrap_port"].as_u64(), self.dialect.as_str(), self.role.as_str())
        {
            flag.push_str(&format!(",bootstrap_port={port}"));
        }
        if let (Some(port), Some((host, _))) = (announced["kv_events_port"].as_u64(), url.rsplit_once(':')) {
            flag.push_str(&format!(",kv_events=tcp://{host}:{port}"));
        }
        flag
    }
}

/// The simulated engine of a directory of programs. An installation has it as a command of `pointsman-lab`.
fn engine(bin: &Path) -> Command {
    let own = bin.join("pointsman-sim");
    if own.is_file() {
        return Command::new(own);
    }
    let mut command = Command::new(bin.join("pointsman-lab"));
    command.arg("sim");
    command
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::EngineSpec;

    #[test]
    fn worker_flags() {
        let announced = json!({ "listening": "127.0.0.1:5", "bootstrap_port": 9 });
        let flag = |dialect, role| EngineSpec::new(dialect, role, "").worker_flag(2, &announced);
        assert_eq!(flag("vllm", "decode"), "id=2,role=decode,engine=vllm,url=http://127.0.0.1:5");
        assert!(flag("sglang", "prefill").ends_with(",bootstrap_port=9"));
        let events = json!({ "listening": "127.0.0.1:5", "kv_events_port": 7 });
        let flag = EngineSpec::new("vllm", "aggregated", "").worker_flag(1, &events);
        assert!(flag.ends_with("127.0.0.1:5,kv_events=tcp://127.0.0.1:7"), "{flag}");
        let ranks = EngineSpec::new("vllm", "prefill", "--dp-size 4").worker("dp_size=4");
        assert!(ranks.worker_flag(1, &announced).ends_with("127.0.0.1:5,dp_size=4"));
    }
}
