//! A place where policies are stored, as written on the command line.

use std::{path::PathBuf, str::FromStr};

use self::reference::{invalid_tag, is_tag};

mod reference;

pub(crate) use self::reference::Reference;

/// A place where policies are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An OCI image layout and a tag in it.
    Layout(PathBuf, String),
    /// A directory, or a file in one.
    Directory(PathBuf),
    /// A repository of a registry.
    Registry(Reference),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(reference) = text.strip_prefix("oci://") {
            return reference.parse().map(Self::Registry);
        }
        if let Some(path) = text.strip_prefix("dir:").filter(|path| !path.is_empty()) {
            return Ok(Self::Directory(path.into()));
        }
        let Some(layout) = text.strip_prefix("oci:").filter(|path| !path.is_empty()) else {
            if Reference::looks_like_one(text) {
                return text.parse().map(Self::Registry);
            }
            return Err(format!(
                "\"{text}\" is not a place: expected oci:DIR[:TAG], dir:PATH or HOST/REPOSITORY[:TAG]"
            ));
        };
        match layout.rsplit_once(':') {
            Some((directory, tag)) if !tag.contains('/') => {
                if directory.is_empty() || !is_tag(tag) {
                    return Err(invalid_tag(tag));
                }
                Ok(Self::Layout(directory.into(), tag.to_owned()))
            }
            _ => Ok(Self::Layout(layout.into(), "latest".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed_and_malformed_ones_reported() {
        let layout = |directory: &str, tag: &str| Ok(Place::Layout(directory.into(), tag.into()));
        assert_eq!("oci:a/b:1.0".parse(), layout("a/b", "1.0"));
        assert_eq!("oci:/a:b/c".parse(), layout("/a:b/c", "latest"));
        assert_eq!("dir:x".parse(), Ok(Place::Directory("x".into())));
        for text in ["oci://r.example/n:1", "r.example/n:1"] {
            let reference = "r.example/n:1".parse().unwrap();
            assert_eq!(text.parse(), Ok(Place::Registry(reference)));
        }
        for (text, part) in [
            ("oci://h", "it has no repository"),
            ("file.wasm", "expected oci:DIR"),
            ("./layout", "expected oci:DIR"),
            ("a/b", "expected oci:DIR"),
            ("oci:a:", "not a valid tag"),
            ("oci:a:-x", "not a valid tag"),
        ] {
            let error = text.parse::<Place>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
