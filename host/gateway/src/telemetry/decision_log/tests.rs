use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use pointsman_decision_log::{FILE_SUFFIX, FileHeader, LoggedRequest};
use prefix_index::{Prefix, Salt as PromptSalt};

use super::*;

fn settings(dir: &Path) -> DecisionLogSettings {
    DecisionLogSettings { dir: Some(dir.to_owned()), file_bytes: 1 << 20, total_bytes: 4 << 20, salt: None }
}

fn entry(number: u64) -> Box<Entry> {
    let tokens: Vec<u32> = (0..64).collect();
    let prefix = Prefix::of_tokens(&tokens, 16, &PromptSalt::default(), &[]);
    Box::new(Entry { arrived_at_us: number, status: 200, code: "ok", prefix, ..Entry::default() })
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut logs: Vec<_> = all.filter(|path| path.to_str().unwrap().ends_with(FILE_SUFFIX)).collect();
    logs.sort();
    logs
}

fn read(file: &Path) -> (FileHeader, Vec<LoggedRequest>) {
    let text = zstd::stream::decode_all(fs::File::open(file).unwrap()).unwrap();
    let text = String::from_utf8(text).unwrap();
    let mut lines = text.lines();
    let header = serde_json::from_str(lines.next().unwrap()).unwrap();
    (header, lines.map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn all(dir: &Path) -> Vec<LoggedRequest> {
    files(dir).iter().flat_map(|file| read(file).1).collect()
}

fn dropped(metrics: &Metrics, reason: &'static str) -> u64 {
    metrics.decision_log_dropped.get_or_create(&ReasonLabels { reason }).get()
}

fn start(settings: &DecisionLogSettings) -> (Arc<DecisionLog>, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    (DecisionLog::start(settings, 16, &metrics).unwrap().unwrap(), metrics)
}

const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn requests_are_written_in_frames_that_can_be_read_alone_with_salted_ids() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/by/the/log");
    let (log, metrics) = start(&settings(&path));
    for number in 0..10 {
        log.submit(entry(number));
        log.flush(LIMIT).await;
    }
    let [file] = &files(&path)[..] else { panic!("one file") };
    let (header, requests) = read(file);
    assert_eq!((header.block_tokens, requests.len()), (16, 10));
    assert_eq!((metrics.decision_log_records.get(), dropped(&metrics, "disk")), (10, 0));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(&path), mode(file), mode(&path.join("salt"))], [0o700, 0o600, 0o600]);
    // Equal prefixes have equal ids, which are not the hashes themselves.
    let first = &requests[0].blocks.ids;
    assert!(requests.iter().all(|request| request.blocks.ids == *first) && first.len() == 4);
    let hashes: Vec<u64> = entry(0).prefix.hashes().iter().map(|hash| hash.0).collect();
    assert!(first.iter().all(|id| !hashes.contains(id) && *id < 1 << 53), "{first:?}");
    // The salt is the same after a restart. Another directory, or a configured salt, gives other ids.
    let (again, _) = start(&settings(&path));
    again.submit(entry(11));
    again.flush(LIMIT).await;
    assert_eq!(all(&path).last().unwrap().blocks.ids, *first);
    let other = dir.path().join("other");
    let (log, _) = start(&DecisionLogSettings { salt: Some("s".into()), ..settings(&other) });
    log.submit(entry(0));
    log.flush(LIMIT).await;
    assert_ne!(all(&other)[0].blocks.ids, *first);
    assert!(!other.join("salt").exists(), "a configured salt is not written");
}

#[tokio::test]
async fn files_rotate_and_the_oldest_leave_before_the_total_is_exceeded() {
    let dir = tempfile::tempdir().unwrap();
    let (log, _) = start(&DecisionLogSettings { total_bytes: 2 << 20, ..settings(dir.path()) });
    let mut next = 0;
    for _ in 0..20 {
        for _ in 0..20 {
            // Every prompt is different, so the ids do not compress.
            let tokens: Vec<u32> = (0..16 * 1_000).map(|token| token ^ next).collect();
            let prefix = Prefix::of_tokens(&tokens, 16, &PromptSalt::default(), &[]);
            log.submit(Box::new(Entry { arrived_at_us: next.into(), prefix, ..Entry::default() }));
            next += 1;
        }
        log.flush(LIMIT).await;
        let total: u64 = files(dir.path()).iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        // I10.4
        assert!(total <= 2 << 20, "{total}");
    }
    let kept = all(dir.path());
    assert!(files(dir.path()).len() == 2 && kept.len() < next as usize, "{} of {next}", kept.len());
    assert_eq!(kept.last().unwrap().arrived_at_us, u64::from(next) - 1, "the newest stay");
}

#[tokio::test]
async fn a_directory_that_is_removed_or_unusable_costs_records_until_it_can_be_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let (log, metrics) = start(&settings(&path));
    log.submit(entry(1));
    log.flush(LIMIT).await;
    let salt = fs::read(path.join("salt")).unwrap();
    fs::remove_dir_all(&path).unwrap();
    log.submit(entry(2));
    log.flush(LIMIT).await;
    assert_eq!(all(&path).len(), 1, "the directory is made again");
    assert_eq!(fs::read(path.join("salt")).unwrap(), salt, "with its salt");
    // A file takes the place of the directory, so nothing can be written.
    fs::remove_dir_all(&path).unwrap();
    fs::write(&path, "").unwrap();
    for number in 0..100 {
        log.submit(entry(number));
        if number == 0 {
            log.flush(LIMIT).await;
        }
    }
    log.flush(LIMIT).await;
    assert_eq!(dropped(&metrics, "disk"), 100);
    fs::remove_file(&path).unwrap();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    log.submit(entry(3));
    log.flush(LIMIT).await;
    assert_eq!((all(&path).len(), dropped(&metrics, "disk")), (1, 100));
    assert_eq!(metrics.decision_log_records.get(), 3);
}

#[tokio::test]
async fn i10_a_directory_that_cannot_be_written_is_found_before_the_first_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fs::write(&path, "").unwrap();
    let (log, _) = start(&settings(&path));
    let until = async |expected: bool| {
        for _ in 0..100 {
            if log.problem().is_some() == expected {
                return log.problem();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("a problem: {:?}", log.problem());
    };
    let problem = until(true).await.unwrap();
    // I10.8
    assert!(problem.starts_with(&format!("the decision log in {} cannot be written: ", path.display())));
    fs::remove_file(&path).unwrap();
    // I10.8: without a request
    until(false).await;
}

#[tokio::test]
async fn a_broken_salt_is_named_and_nothing_is_written_without_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("salt"), "hello").unwrap();
    let error = salt::Salt::of_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("salt does not hold 64 hexadecimal digits: remove it"), "{error}");
    let (log, metrics) = start(&settings(dir.path()));
    log.submit(entry(1));
    log.flush(LIMIT).await;
    assert_eq!((dropped(&metrics, "disk"), files(dir.path()).len()), (1, 0));
}

#[test]
fn i10_an_empty_salt_is_made_anew_and_a_whole_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("salt"), "").unwrap();
    let made = salt::Salt::of_dir(dir.path()).unwrap();
    let text = fs::read_to_string(dir.path().join("salt")).unwrap();
    // I10.9
    assert!(text.len() == 64 && salt::Salt::of_dir(dir.path()).unwrap() == made);
    salt::Salt::configured("other").keep(dir.path()).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("salt")).unwrap(), text);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no other file stays");
}

#[test]
fn a_writer_that_is_behind_costs_records_and_no_wait() {
    let metrics = Arc::new(Metrics::default());
    let (queue, receiver) = sync_channel(4);
    let (queued_bytes, problem) = (Arc::default(), Problem::default());
    let log = DecisionLog { queue, queued_bytes, problem, metrics: metrics.clone() };
    (0..10).for_each(|number| log.submit(entry(number)));
    assert_eq!(dropped(&metrics, "queue"), 6);
    drop(receiver.try_iter().collect::<Vec<_>>());
    // A few requests with many blocks reach the limit in bytes.
    log.queued_bytes.store(0, Ordering::Relaxed);
    let prefix: Prefix = vec![pointsman_workers::BlockHash(1); MAX_QUEUED_BYTES / 16].into();
    (0..3).for_each(|_| log.submit(Box::new(Entry { prefix: prefix.clone(), ..Entry::default() })));
    assert_eq!(dropped(&metrics, "queue"), 6 + 2);
    drop(receiver);
    log.submit(entry(1));
    assert_eq!(dropped(&metrics, "queue"), 6 + 3, "a writer that ended");
}
