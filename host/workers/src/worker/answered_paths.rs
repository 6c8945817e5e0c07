//! Paths of which the engine's process answered a request with success: it does not lack them.

use super::Worker;

#[derive(Debug, Default)]
pub(super) struct AnsweredPaths {
    process: u32,
    paths: Vec<&'static str>,
}

impl Worker {
    /// Notes that the engine answered a request of this path with success.
    pub fn note_answered_path(&self, path: &'static str) {
        if self.has_answered_path(path) {
            return;
        }
        let process = self.process();
        self.state.answered_paths.rcu(|known| {
            let others = known.paths.iter().filter(|other| known.process == process && **other != path);
            AnsweredPaths { process, paths: others.copied().chain([path]).collect() }
        });
    }

    /// Returns whether the engine's process answered a request of this path with success.
    #[must_use]
    pub fn has_answered_path(&self, path: &str) -> bool {
        let known = self.state.answered_paths.load();
        known.process == self.process() && known.paths.contains(&path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerSpec;

    #[test]
    fn i17_the_paths_of_another_process_do_not_count() {
        let spec = WorkerSpec::parse_flag("id=1,role=aggregated,engine=vllm,url=http://a:1").unwrap();
        let worker = Worker::new(spec);
        let has = || ["/a", "/b"].map(|path| worker.has_answered_path(path));
        assert_eq!(has(), [false, false]);
        ["/a", "/b", "/a"].into_iter().for_each(|path| worker.note_answered_path(path));
        assert_eq!(has(), [true, true]);
        worker.note_new_process();
        // I17.7
        assert_eq!(has(), [false, false]);
        worker.note_answered_path("/b");
        assert_eq!(has(), [false, true]);
    }
}
