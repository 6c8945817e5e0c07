//! As a filter: keeps every row until it is due.

#[allow(missing_docs, unsafe_code, unreachable_pub, clippy::all, reason = "generated")]
mod bindings {
    wit_bindgen::generate!({ path: "../../../wit", world: "filter" });
}

use bindings::exports::pointsman::policy::filtering::{Call, Error, Guest};

use crate::script::{due, introduce, misbehave};

struct Rogue;

introduce!();

impl Guest for Rogue {
    fn keep(call: Call, _: Vec<u32>) -> Result<Vec<u32>, Error> {
        let deed = due();
        misbehave(deed).map_err(Error::Internal)?;
        let rows = 0..call.rows;
        Ok(match deed {
            "unsorted" => (0..=call.rows.max(1)).rev().map(|row| row.min(call.rows - 1)).collect(),
            "twice" => rows.flat_map(|row| [row, row]).collect(),
            "beyond" => vec![call.rows],
            "huge" => vec![0; 1 << 18],
            _ => rows.collect(),
        })
    }
}

#[allow(unsafe_code, reason = "generated")]
mod export {
    use super::{Rogue, bindings};

    bindings::export!(Rogue with_types_in bindings);
}
