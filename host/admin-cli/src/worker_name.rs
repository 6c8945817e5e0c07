//! Workers as operators name them: by id, URL or address, or by a beginning that no other worker has.

use crate::{
    answer::GatewayError,
    api::{Worker, Workers},
    gateway::Gateway,
    text::clean,
};

/// Word before the id of a worker in a text.
const WORD: &str = "worker ";
/// Workers that an error lists.
const LISTED: usize = 5;

/// Asks the gateway which worker a name stands for.
pub(crate) async fn worker_of(gateway: &Gateway, name: &str) -> Result<Worker, GatewayError> {
    let workers: Workers = gateway.get("/workers").await?.read()?;
    find(&workers.workers, name).cloned().map_err(GatewayError::NoWorker)
}

/// Finds a worker. A whole id, URL or address wins over a beginning of another worker's.
fn find<'a>(workers: &'a [Worker], name: &str) -> Result<&'a Worker, String> {
    let name = name.trim_end_matches('/');
    let whole = workers.iter().find(|worker| names(worker).iter().any(|one| one == name));
    if let Some(worker) = whole {
        return Ok(worker);
    }
    let begins = |worker: &&Worker| !name.is_empty() && names(worker).iter().any(|one| one.starts_with(name));
    let found: Vec<&Worker> = workers.iter().filter(begins).collect();
    match found.as_slice() {
        [one] => Ok(one),
        [] => Err(format!("no worker is `{}`; `pointsman workers` lists ids and URLs", clean(name))),
        several => {
            let shown = |worker: &&Worker| format!("{} ({})", worker.id, clean(&worker.spec.url));
            let mut listed: Vec<String> = several.iter().take(LISTED).map(shown).collect();
            if several.len() > LISTED {
                listed.push("…".to_owned());
            }
            Err(format!("`{}` may be {} workers: {}", clean(name), several.len(), listed.join(", ")))
        }
    }
}

/// Id, URL and address of a worker.
fn names(worker: &Worker) -> [String; 3] {
    let url = worker.spec.url.trim_end_matches('/');
    [worker.id.to_string(), url.to_owned(), address(worker).to_owned()]
}

/// The URL of a worker without its scheme.
#[must_use]
pub fn address(worker: &Worker) -> &str {
    let url = worker.spec.url.trim_end_matches('/');
    url.split_once("://").map_or(url, |(_, address)| address)
}

/// Returns whether an id is a hash of the worker's URL, which says less than its address.
#[must_use]
pub fn is_hash(id: &str) -> bool {
    id.len() > 10
}

/// Returns whether a text has an id of a worker that [`with_addresses`] may replace.
pub(crate) fn names_hashes(text: &str) -> bool {
    text.split(WORD).skip(1).any(|part| is_hash(split_id(part).0))
}

/// Splits a text behind the id with which it begins.
fn split_id(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// Replaces ids of workers in a text by their addresses, if they are hashes.
#[must_use]
pub fn with_addresses(text: &str, workers: &[Worker]) -> String {
    let mut parts = text.split(WORD);
    let mut named = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (id, rest) = split_id(part);
        let worker = workers.iter().find(|worker| is_hash(id) && worker.id.to_string() == id);
        let name = worker.map_or(id.into(), |worker| clean(address(worker)));
        named.extend([WORD, &*name, rest]);
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers() -> Vec<Worker> {
        let worker = |id: u64, url: &str| {
            let spec = serde_json::json!({ "url": url, "role": "decode", "engine": "vllm" });
            let worker = serde_json::json!({
                "id": id, "spec": spec, "models": [], "draining": false, "open_handoffs": 0, "paused": false,
                "ineligible": null, "reason": null, "engine_load": null, "ranks": [],
            });
            serde_json::from_value(worker).expect("a worker")
        };
        vec![
            worker(7, "http://10.0.0.1:8000/"),
            worker(71, "http://10.0.0.2:8000"),
            worker(9_007_199_254_740_993, "https://decode-a.example:8000/v"),
        ]
    }

    #[test]
    fn a_worker_is_found_by_each_of_its_names_and_by_a_unique_beginning() {
        let workers = workers();
        for (name, id) in [
            ("7", 7),
            ("71", 71),
            ("http://10.0.0.1:8000", 7),
            ("10.0.0.2:8000", 71),
            ("10.0.0.2", 71),
            ("decode-a", 9_007_199_254_740_993),
            ("https://decode-a.example:8000/v/", 9_007_199_254_740_993),
            ("90", 9_007_199_254_740_993),
        ] {
            // O1.9
            assert_eq!(find(&workers, name).map(|worker| worker.id), Ok(id), "{name}");
        }
    }

    #[test]
    fn a_text_names_workers_by_their_addresses() {
        let text =
            "worker 9007199254740993 gets no request: paused, worker 7 is busy, worker 9007199254740994";
        // O1.29
        assert_eq!(
            with_addresses(text, &workers()),
            "worker decode-a.example:8000/v gets no request: paused, worker 7 is busy, worker 9007199254740994"
        );
    }

    #[test]
    fn only_a_text_with_a_long_id_is_worth_the_list_of_workers() {
        // O1.29
        assert!(names_hashes("no worker for it; worker 7 is busy, worker 9007199254740993 is paused"));
        assert!(!names_hashes("no worker 12345 serves it; worker 7 is busy; 9007199254740993; worker "));
    }

    #[test]
    fn a_name_of_none_or_of_several_is_an_error_that_says_so() {
        let workers = workers();
        let problem = |name: &str| find(&workers, name).map(|worker| worker.id).unwrap_err();
        // O1.9
        assert_eq!(problem("8"), "no worker is `8`; `pointsman workers` lists ids and URLs");
        assert_eq!(
            problem("10.0"),
            "`10.0` may be 2 workers: 7 (http://10.0.0.1:8000/), 71 (http://10.0.0.2:8000)"
        );
        assert!(problem("").starts_with("no worker"), "{}", problem(""));
        assert!(!problem("\u{1b}[2J").contains('\u{1b}'));
    }
}
