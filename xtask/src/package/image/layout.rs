//! The OCI layout of an image, as an archive: blobs named after their digests, and an index.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use super::{super::contents::Release, config};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Returns the archive of a layout with one image of one layer.
pub(super) fn archive(layer: Vec<u8>, config: &Value, release: &Release) -> anyhow::Result<Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut blob = |media_type: &str, content: Vec<u8>| {
        let (digest, size) = (sha256(&content), content.len());
        files.insert(format!("blobs/sha256/{digest}"), content);
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
    };
    let layer = blob("application/vnd.oci.image.layer.v1.tar+gzip", layer);
    let config = blob("application/vnd.oci.image.config.v1+json", bytes(config));
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": config::labels(release),
    });
    let mut manifest = blob(MANIFEST, bytes(&manifest));
    manifest["platform"] = json!({ "architecture": config::architecture(), "os": "linux" });
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": tag(&release.version) });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    files.insert("index.json".to_owned(), bytes(&index));
    files.insert("oci-layout".to_owned(), bytes(&json!({ "imageLayoutVersion": "1.0.0" })));
    pack(&files, release.time)
}

/// Returns the SHA-256 of bytes in hexadecimal.
pub(super) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A version as a tag, which has no `+`.
fn tag(version: &str) -> String {
    version.replace('+', "-")
}

/// JSON with sorted keys, whatever features serde_json is built with.
fn bytes(value: &Value) -> Vec<u8> {
    let mut value = value.clone();
    value.sort_all_objects();
    value.to_string().into_bytes()
}

fn pack(files: &BTreeMap<String, Vec<u8>>, time: u64) -> anyhow::Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    let mut append = |path: &str, content: Option<&[u8]>| {
        let mut header = Header::new_ustar();
        let kind = if content.is_some() { EntryType::Regular } else { EntryType::Directory };
        header.set_entry_type(kind);
        header.set_mode(if content.is_some() { 0o644 } else { 0o755 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(time);
        let content = content.unwrap_or_default();
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, path, content).with_context(|| format!("packing {path}"))
    };
    append("blobs/", None)?;
    append("blobs/sha256/", None)?;
    for (path, content) in files {
        append(path, Some(content))?;
    }
    Ok(archive.into_inner()?)
}

#[cfg(test)]
mod tests {
    use super::{bytes, sha256, tag};

    #[test]
    fn digests_keys_and_tags() {
        assert_eq!(sha256(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(
            bytes(&serde_json::json!({ "b": 1, "a": { "d": 2, "c": 3 } })),
            br#"{"a":{"c":3,"d":2},"b":1}"#
        );
        assert_eq!(tag("0.1.0+6032306ab12c"), "0.1.0-6032306ab12c");
    }
}
