//! Threads that yield to requests.

/// What a thread that makes policies ready may wait for, as `nice` counts: the higher, the longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Reads the folder, rolls back, drops and rebuilds instances: soon, and after requests.
    Chores,
    /// Compiles: when nobody else wants the core.
    Compile,
}

impl Priority {
    /// Sets that of the calling thread. On Linux it is the thread's alone.
    pub(crate) fn take(self) {
        let nice = match self {
            Self::Chores => 10,
            Self::Compile => 19,
        };
        if let Err(error) = rustix::process::setpriority_process(None, nice) {
            tracing::debug!(%error, ?self, "a thread keeps its priority");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_calling_thread_s_alone() {
        let nice = || rustix::process::getpriority_process(None).expect("it has one");
        let before = nice();
        let within = std::thread::spawn(move || {
            Priority::Compile.take();
            nice()
        });
        assert_eq!(within.join().expect("it ends"), 19);
        assert_eq!(nice(), before);
    }
}
