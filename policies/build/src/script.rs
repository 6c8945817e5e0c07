//! Policies in Python, JavaScript and TypeScript: their tools, installed once into a folder of ours, and
//! the call of them.
//!
//! Sources are copied into a folder beside the tools, together with the helper module and the contract:
//! nothing is written into the source tree, and a policy builds wherever it lies.
//!
//! With a cache, a build replaces the memory in the component of an earlier build, where that is enough.

mod exports;
mod javascript;
mod job;
mod python;
mod template;

pub use javascript::{JS_HELPER, JS_HELPER_TYPES, TYPESCRIPT};
pub(crate) use javascript::{javascript, typescript};
pub(crate) use job::Job;
pub use python::PYTHON_HELPER;
pub(crate) use python::python;
