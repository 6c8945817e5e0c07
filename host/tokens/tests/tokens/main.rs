//! Model directories, chat templates compared with vLLM's output, and the cache compared with plain encoding.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout, reason = "tests")]

mod conversations;
mod fast;
mod golden;
mod load;
mod prompt_key;
mod reuse;
mod support;
