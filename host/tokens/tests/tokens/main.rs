//! Model folders, chat templates against vLLM's own output, and the cache against plain encoding.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::print_stdout, reason = "tests")]

mod golden;
mod load;
mod reuse;
mod support;
