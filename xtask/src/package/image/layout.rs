//! The OCI layout of an image, as an archive: blobs named after their digests, and an index.

use serde_json::{Value, json};

use super::{super::commit::Commit, config, layer, tree::Tree};
use crate::digest::sha256;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Returns the archive of a layout with one image of one layer.
pub(super) fn archive(layer: Vec<u8>, config: &Value, commit: &Commit) -> anyhow::Result<Vec<u8>> {
    let mut files = Tree::default();
    let mut blob = |media_type: &str, content: Vec<u8>| {
        let (digest, size) = (sha256(&content), content.len());
        files.file(&format!("blobs/sha256/{digest}"), content, 0o644);
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
    };
    let layer = blob("application/vnd.oci.image.layer.v1.tar+gzip", layer);
    let config = blob("application/vnd.oci.image.config.v1+json", bytes(config));
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": config::labels(commit),
    });
    let mut manifest = blob(MANIFEST, bytes(&manifest));
    manifest["platform"] = json!({ "architecture": config::architecture(), "os": "linux" });
    manifest["annotations"] = json!({ "org.opencontainers.image.ref.name": tag(&commit.version) });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    });
    files.file("index.json", bytes(&index), 0o644);
    files.file("oci-layout", bytes(&json!({ "imageLayoutVersion": "1.0.0" })), 0o644);
    layer::archive(&files, commit.time)
}

/// Returns a version as a tag, which must not contain `+`.
fn tag(version: &str) -> String {
    version.replace('+', "-")
}

/// Returns JSON with sorted keys, whatever the features of serde_json.
fn bytes(value: &Value) -> Vec<u8> {
    let mut value = value.clone();
    value.sort_all_objects();
    value.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::{bytes, tag};

    #[test]
    fn keys_and_tags() {
        assert_eq!(
            bytes(&serde_json::json!({ "b": 1, "a": { "d": 2, "c": 3 } })),
            br#"{"a":{"c":3,"d":2},"b":1}"#
        );
        assert_eq!(tag("0.1.0+6032306ab12c"), "0.1.0-6032306ab12c");
    }
}
