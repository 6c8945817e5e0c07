//! Encodes long prompts beside the runtime: few at a time, of which one may be very long, with a bounded
//! number waiting. An encode that nothing waits for any more ends.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use pointsman_tokens::Tokenizer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    budget::{Budget, Share},
    openai::request::Request,
};

/// Number of prompts that are encoded at the same time.
const MAX_CONCURRENT_ENCODES: usize = 2;
/// Number of very long prompts among them: the others always find a thread.
const MAX_CONCURRENT_LONG_ENCODES: usize = 1;
/// Prompt from which on it counts as very long, bytes: it takes more than 50 ms.
const LONG_PROMPT_BYTES: usize = 256 * 1024;
/// Number of prompts that are encoded or wait for it.
const MAX_PROMPTS: usize = 256;
/// Size of the prompts that are encoded or wait for it, bytes.
const MAX_PROMPT_BYTES: usize = 64 * 1024 * 1024;

/// The threads for long prompts, and the prompts that wait for them.
#[derive(Debug)]
pub(super) struct Encodes {
    turns: Arc<Semaphore>,
    long_turns: Arc<Semaphore>,
    prompts: Arc<Budget>,
    bytes: Arc<Budget>,
}

/// What an encode holds while it runs.
struct Turn {
    _turn: OwnedSemaphorePermit,
    _long: Option<OwnedSemaphorePermit>,
    _place: (Share, Share),
}

/// Stops an encode when it is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Default for Encodes {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(MAX_CONCURRENT_ENCODES)),
            long_turns: Arc::new(Semaphore::new(MAX_CONCURRENT_LONG_ENCODES)),
            prompts: Budget::new(MAX_PROMPTS),
            bytes: Budget::new(MAX_PROMPT_BYTES),
        }
    }
}

impl Encodes {
    /// Encodes a prompt. Dropping the future gives up its place, or ends the encode within a few
    /// milliseconds.
    ///
    /// # Errors
    /// A stable label.
    pub(super) async fn run(
        &self,
        tokenizer: Arc<Tokenizer>,
        request: Arc<Request>,
    ) -> Result<Vec<u32>, &'static str> {
        let turn = self.turn(request.prompt().len()).await?;
        let stopped = Arc::<AtomicBool>::default();
        let _stop = StopOnDrop(stopped.clone());
        let encode = move || {
            let _turn = turn;
            super::encode(&tokenizer, &request, &stopped)
        };
        // The library may panic on input that it does not expect: the request goes on without tokens.
        tokio::task::spawn_blocking(encode).await.unwrap_or(Err("panicked"))
    }

    async fn turn(&self, bytes: usize) -> Result<Turn, &'static str> {
        let place = (self.prompts.take(1).ok_or("queue_full")?, self.bytes.take(bytes).ok_or("queue_full")?);
        let closed = |_| "tokenizer_closed";
        let long = match bytes > LONG_PROMPT_BYTES {
            true => Some(self.long_turns.clone().acquire_owned().await.map_err(closed)?),
            false => None,
        };
        let turn = self.turns.clone().acquire_owned().await.map_err(closed)?;
        Ok(Turn { _turn: turn, _long: long, _place: place })
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_short_prompt_finds_a_thread_beside_very_long_ones() {
        let encodes = Encodes::default();
        let first = encodes.turn(LONG_PROMPT_BYTES + 1).await.ok().unwrap();
        let mut second = Box::pin(encodes.turn(LONG_PROMPT_BYTES + 1));
        assert!(second.as_mut().now_or_never().is_none(), "one very long prompt at a time");
        let short = encodes.turn(LONG_PROMPT_BYTES).now_or_never().unwrap();
        assert!(short.is_ok());
        assert!(encodes.turn(10).now_or_never().is_none(), "two at a time");
        drop((first, short));
        assert!(second.await.is_ok());
        assert_eq!((encodes.prompts.used(), encodes.bytes.used()), (0, 0));
    }

    #[tokio::test]
    async fn the_queue_is_bounded_by_number_and_bytes_and_left_by_those_who_give_up() {
        let encodes = Encodes::default();
        let _running = [encodes.turn(1).await, encodes.turn(1).await];
        let mut waiting: Vec<_> = (2..MAX_PROMPTS).map(|_| Box::pin(encodes.turn(1))).collect();
        assert!(waiting.iter_mut().all(|turn| turn.as_mut().now_or_never().is_none()));
        assert_eq!(encodes.turn(1).await.err(), Some("queue_full"));
        drop(waiting);
        assert_eq!(encodes.prompts.used(), 2);
        assert_eq!(encodes.turn(MAX_PROMPT_BYTES).await.err(), Some("queue_full"));
    }
}
