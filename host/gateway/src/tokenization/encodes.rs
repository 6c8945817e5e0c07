//! Encodes long prompts on threads beside the runtime. An encode that nothing waits for any more ends.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use pointsman_tokens::{EncodePool, PoolFull, PoolLimits, PromptKey, PromptTokens, Tokenizer};
use tokio::sync::oneshot;

use crate::openai::request::Request;

/// Size from which on a prompt leaves one thread to the others, bytes.
const LONG_PROMPT_BYTES: usize = 256 * 1024;
/// Number of prompts that are encoded or wait for it.
const MAX_PROMPTS: usize = 256;
/// Size of the prompts that are encoded or wait for it, bytes.
const MAX_PROMPT_BYTES: usize = 64 * 1024 * 1024;

/// The threads for long prompts, and the prompts that wait for them.
#[derive(Debug)]
pub(super) struct Encodes {
    limits: PoolLimits,
    /// Started with the first tokenizer.
    pool: OnceLock<EncodePool>,
}

impl Encodes {
    pub(super) fn new(threads: usize) -> Self {
        let limits = PoolLimits {
            threads,
            prompts: MAX_PROMPTS,
            bytes: MAX_PROMPT_BYTES,
            long_bytes: LONG_PROMPT_BYTES,
        };
        Self { limits, pool: OnceLock::new() }
    }

    /// Starts the threads, if they do not run.
    pub(super) fn start(&self) -> io::Result<()> {
        if self.pool.get().is_none() {
            // If two are started at the same time, the second ends again.
            let _second = self.pool.set(EncodePool::start(self.limits)?);
        }
        Ok(())
    }

    /// Encodes a prompt of `tenant`. Dropping the future gives up its place, or ends the encode within a few
    /// milliseconds.
    ///
    /// # Errors
    /// A stable label.
    pub(super) async fn run(
        &self,
        tokenizer: Arc<Tokenizer>,
        request: Arc<Request>,
        key: Option<Arc<PromptKey>>,
        tenant: u64,
    ) -> Result<PromptTokens, &'static str> {
        let pool = self.pool.get().ok_or("tokenizer_closed")?;
        let (sender, receiver) = oneshot::channel();
        let bytes = request.tokenized_bytes();
        let work = Box::new(move |stopped: Result<&_, PoolFull>| {
            let outcome = match stopped {
                Ok(stopped) => super::encode(&tokenizer, &request, key.as_deref(), stopped),
                Err(PoolFull) => Err("queue_full"),
            };
            // The request may have continued without its tokens.
            let _unheard = sender.send(outcome);
        });
        let _ticket = pool.submit(tenant, bytes, work);
        // The library may panic on input that it does not expect: the request continues without tokens.
        receiver.await.unwrap_or(Err("panicked"))
    }
}
