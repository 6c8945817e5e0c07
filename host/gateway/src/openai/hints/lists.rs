//! Limits of the lists in `nvext`.

use std::collections::HashSet;

use json_splice::JsonBody;

use crate::openai::{
    limits::{MAX_TOKEN_IDS, at_most},
    request_error::RequestError,
    short_text::shortened,
};

/// Maximum number of JSON values in the objects of a multimodal prompt, all blocks together.
const MAX_OBJECT_VALUES: usize = 262_144;

/// Maximum number of taints of each kind, required or preferred.
const MAX_TAINTS: usize = 64;

/// Fields of `nvext` that are lists or objects, with the limit of their elements.
const LISTS: [(&str, usize); 5] = [
    ("allowed_worker_ids", 4_096),
    ("required_taints", MAX_TAINTS),
    ("preferred_taints", MAX_TAINTS),
    ("annotations", 64),
    ("token_data", MAX_TOKEN_IDS),
];
/// The same within `nvext.mm_routing_info`.
const MULTIMODAL_LISTS: [(&str, usize); 2] =
    [("routing_token_ids", MAX_TOKEN_IDS), ("block_mm_infos", 65_536)];

/// Checks the lengths of the lists in `nvext`, before anything is allocated for them.
pub(super) fn check(body: &JsonBody) -> Result<(), RequestError> {
    let Some(ext) = object(body, "nvext", "nvext")? else { return Ok(()) };
    for (field, limit) in LISTS {
        at_most(&format!("nvext.{field}"), "elements", ext.counts(field).items, limit)?;
    }
    if let Some(constraints) = object(&ext, "routing_constraints", "nvext.routing_constraints")? {
        for field in ["required_taints", "preferred_taints"] {
            let path = format!("nvext.routing_constraints.{field}");
            at_most(&path, "elements", constraints.counts(field).items, MAX_TAINTS)?;
        }
    }
    let Some(multimodal) = object(&ext, "mm_routing_info", "nvext.mm_routing_info")? else { return Ok(()) };
    for (field, limit) in MULTIMODAL_LISTS {
        let path = format!("nvext.mm_routing_info.{field}");
        at_most(&path, "elements", multimodal.counts(field).items, limit)?;
    }
    let values = multimodal.counts("block_mm_infos").values;
    at_most("nvext.mm_routing_info.block_mm_infos", "JSON values", values, MAX_OBJECT_VALUES)
}

/// The object under a key; `path` names it in errors. Each of its keys is there once: only the last one's
/// elements are counted.
fn object(body: &JsonBody, key: &str, path: &str) -> Result<Option<JsonBody>, RequestError> {
    let Some(inner) = body.object(key) else { return Ok(None) };
    let inner = inner.map_err(|error| RequestError::new(path, &error.to_string()))?;
    let twice = {
        let mut keys = HashSet::new();
        inner.keys().find(|key| !keys.insert(*key)).map(shortened)
    };
    match twice {
        Some(key) => Err(RequestError::new(path, &format!("the key `{key}` appears twice; send it once"))),
        None => Ok(Some(inner)),
    }
}
