//! Fields of a body that belong to the gateway and to the engines: never taken from a client (A5).
//!
//! docs/behaviour.md has the table of these fields, with the file of each engine that reads them.

use bytes::Bytes;
use json_splice::{Edit, JsonBody};

use crate::openai::{
    request::Request,
    reserved::{CONTAINERS, RESERVED_FIELDS},
};

/// Depth to which containers within containers are searched.
const LEVELS: u32 = 2;

/// Starts an edit that removes the reserved fields, also from containers.
pub(super) fn clean(request: &Request) -> Edit<'_> {
    clean_object(&request.body, LEVELS)
}

fn clean_object(body: &JsonBody, levels: u32) -> Edit<'_> {
    let edit = body.edit().strip(&RESERVED_FIELDS);
    CONTAINERS.iter().fold(edit, |edit, container| match cleaned(body, container, levels) {
        Some(json) => edit.set(container, json),
        None => edit,
    })
}

/// The JSON of a container without the reserved fields; `None` when it has none of them.
fn cleaned(body: &JsonBody, container: &str, levels: u32) -> Option<String> {
    let value = body.get(container)?;
    // Of several equal keys, engines' parsers take the last one, as this code does; other parsers may not.
    let several = body.keys().filter(|key| *key == container).count() > 1;
    let Some(object) = body.object(container) else { return several.then(|| value.to_owned()) };
    // An object beyond the limits, or too deep within others, cannot be cleaned and is not passed on.
    let Some(object) = object.ok().filter(|_| levels > 0) else { return Some("null".to_owned()) };
    let clean: Bytes = clean_object(&object, levels - 1).finish();
    if !several && clean == *object.bytes() {
        return None;
    }
    Some(String::from_utf8_lossy(&clean).into_owned())
}
