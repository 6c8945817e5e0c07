//! Limit of the streams that wait for the headers of their requests. No limit of the requests counts them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use tonic::Status;

/// Streams without a request.
pub(crate) struct SilentStreams {
    open: Arc<AtomicUsize>,
    limit: usize,
}

/// One of them. Dropping it ends the count.
pub(crate) struct Silent(Arc<AtomicUsize>);

impl SilentStreams {
    pub(crate) fn new(limit: usize) -> Self {
        Self { open: Arc::default(), limit }
    }

    /// Counts a stream.
    ///
    /// # Errors
    /// There are as many as may be.
    pub(crate) fn open(&self) -> Result<Silent, Status> {
        let before = self.open.fetch_add(1, Relaxed);
        let silent = Silent(self.open.clone());
        if before < self.limit {
            return Ok(silent);
        }
        Err(Status::resource_exhausted(format!(
            "opening a stream: {} streams wait for the headers of their requests, and no more may (ext_proc.max_streams)",
            self.limit
        )))
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
