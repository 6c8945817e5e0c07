//! The first requests of a trace, moved to different arrival times.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

/// Number of tokens in a block of the trace.
pub(super) const BLOCK: usize = 512;

/// One request of a Mooncake trace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Time of arrival, milliseconds.
    timestamp: f64,
    pub(super) input_length: u64,
    pub(super) output_length: u64,
    pub(super) hash_ids: Vec<u32>,
}

impl Request {
    pub(super) fn at(&self) -> Duration {
        Duration::from_secs_f64(self.timestamp.max(0.0) / 1e3)
    }

    /// Returns the prompt as token ids: equal blocks have equal tokens, as in the lab.
    pub(super) fn prompt(&self) -> Vec<u32> {
        let tokens = self.hash_ids.iter().flat_map(|id| std::iter::repeat_n(*id, BLOCK));
        tokens.take(usize::try_from(self.input_length).unwrap_or(usize::MAX)).collect()
    }
}

/// Reads `count` requests. Mooncake's times are rounded to seconds. Requests with the same time are spread
/// over the time to the next one, so that their order is the same everywhere.
pub(super) fn read(path: &Path, count: usize, speed: f64) -> anyhow::Result<Vec<Request>> {
    ensure!(speed.is_finite() && speed > 0.0, "--speed is {speed}: expected a number above 0");
    let text = std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty()).take(count.saturating_add(1));
    let all = lines.enumerate().map(|(place, line)| {
        serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), place + 1))
    });
    let mut requests = spread(all.collect::<anyhow::Result<_>>()?, count);
    ensure!(!requests.is_empty(), "{}: contains no request", path.display());
    requests.iter_mut().for_each(|request| request.timestamp /= speed);
    Ok(requests)
}

fn spread(mut requests: Vec<Request>, count: usize) -> Vec<Request> {
    let start = requests.first().map_or(0.0, |request| request.timestamp);
    let mut from = 0;
    while let Some(first) = requests.get(from).map(|request| request.timestamp) {
        let together = requests[from..].iter().take_while(|request| request.timestamp <= first).count();
        let next = requests.get(from + together).map_or(first + 1_000.0, |request| request.timestamp);
        for (place, request) in requests[from..from + together].iter_mut().enumerate() {
            request.timestamp = first - start + (next - first) * place as f64 / together as f64;
        }
        from += together;
    }
    requests.truncate(count);
    requests
}

/// Writes requests as a Mooncake trace.
pub(super) fn write(requests: &[Request]) -> String {
    let lines = requests.iter().filter_map(|request| serde_json::to_string(request).ok());
    lines.map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::{Request, spread};

    #[test]
    fn requests_of_the_same_second_are_spread_until_the_next() {
        let request =
            |timestamp| Request { timestamp, input_length: 600, output_length: 1, hash_ids: vec![7, 8] };
        let all = spread([3.0, 3.0, 3.0, 9.0, 12.0].map(request).to_vec(), 4);
        let times: Vec<f64> = all.iter().map(|request| request.timestamp).collect();
        assert_eq!(times, [0.0, 2.0, 4.0, 6.0]);
        let prompt = all[0].prompt();
        assert_eq!((prompt.len(), prompt[511], prompt[512]), (600, 7, 8));
    }
}
