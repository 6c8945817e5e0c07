//! An `EndpointPickerConfig` as far as it is read, with the line of each part.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
};

use anyhow::{Context as _, bail};

use crate::{
    report::{Place, plain},
    yaml::Node,
};

/// Beginnings of the versions of the configuration that are read: llm-d's (`v1alpha1`, `v1`), and its
/// predecessor's.
const VERSIONS: [&str; 2] = ["llm-d.ai/v1", "inference.networking.x-k8s.io/v1"];

/// A configuration.
pub(super) struct Config<'a> {
    pub(super) root: &'a Node,
    pub(super) plugins: Vec<Plugin<'a>>,
    pub(super) profiles: Vec<Profile<'a>>,
}

/// A plugin of the list `plugins`.
pub(super) struct Plugin<'a> {
    pub(super) name: &'a str,
    pub(super) kind: &'a str,
    pub(super) place: Place,
    params: Option<&'a Node>,
    /// Parameters that were looked at.
    read: RefCell<BTreeSet<String>>,
    /// Whether the report lists it already.
    pub(super) is_told: Cell<bool>,
}

/// A scheduling profile.
pub(super) struct Profile<'a> {
    pub(super) name: &'a str,
    pub(super) line: usize,
    pub(super) entries: Vec<Entry<'a>>,
}

/// A plugin of a profile.
pub(super) struct Entry<'a> {
    pub(super) plugin: &'a str,
    pub(super) place: Place,
    pub(super) weight: Option<f64>,
}

impl<'a> Config<'a> {
    /// Reads the configuration below a node.
    ///
    /// # Errors
    /// The version is unknown, or the lists of plugins and profiles contradict each other.
    pub(super) fn read(root: &'a Node) -> anyhow::Result<Self> {
        let version = root.get("apiVersion").and_then(Node::text).unwrap_or_default();
        let is_later = |rest: &str| rest.is_empty() || rest.starts_with("alpha") || rest.starts_with("beta");
        if !VERSIONS.iter().filter_map(|known| version.strip_prefix(known)).any(is_later) {
            bail!("apiVersion `{}` is not known: expected {}", plain(version), VERSIONS.join(" or "));
        }
        let mut plugins: Vec<Plugin<'a>> = Vec::new();
        for node in list(root, "plugins")? {
            let plugin = Plugin::read(node)?;
            if plugins.iter().any(|other| other.name == plugin.name) {
                bail!("line {}: the plugin `{}` appears twice", node.line, plain(plugin.name));
            }
            plugins.push(plugin);
        }
        let profiles: anyhow::Result<Vec<_>> =
            list(root, "schedulingProfiles")?.iter().map(Profile::read).collect();
        let mut config = Self { root, plugins, profiles: profiles? };
        // A profile may name a type that the list of plugins does not have: it has no parameters then.
        let mut implied: Vec<Plugin<'a>> = Vec::new();
        for entry in config.profiles.iter().flat_map(|profile| &profile.entries) {
            let is_known = |plugin: &Plugin<'a>| plugin.name == entry.plugin;
            if !config.plugins.iter().chain(&implied).any(is_known) {
                implied.push(Plugin::implied(entry.plugin, entry.place));
            }
        }
        config.plugins.extend(implied);
        Ok(config)
    }

    /// Returns the plugin with this name.
    pub(super) fn plugin(&self, name: &str) -> Option<&Plugin<'a>> {
        self.plugins.iter().find(|plugin| plugin.name == name)
    }

    /// Returns the first plugin of this type.
    pub(super) fn of_kind(&self, kind: &str) -> Option<&Plugin<'a>> {
        self.plugins.iter().find(|plugin| plugin.kind == kind)
    }

    /// Returns the profile with this name.
    pub(super) fn profile(&self, name: &str) -> Option<&Profile<'a>> {
        self.profiles.iter().find(|profile| profile.name == name)
    }

    /// Returns whether a feature gate is on.
    pub(super) fn has_gate(&self, name: &str) -> bool {
        let gates = self.root.get("featureGates").map(Node::list).unwrap_or_default();
        let on = |gate: &str| gate == name || gate.strip_prefix(name) == Some("=true");
        gates.iter().filter_map(Node::text).any(on)
    }
}

impl<'a> Plugin<'a> {
    fn read(node: &'a Node) -> anyhow::Result<Self> {
        let kind = node.get("type").and_then(Node::text);
        let kind = kind.with_context(|| format!("line {}: a plugin without `type`", node.line))?;
        let name = node.get("name").and_then(Node::text).unwrap_or(kind);
        let params = node.get("parameters").filter(|params| !params.is_null());
        Ok(Self {
            name,
            kind,
            place: Place::Line(node.line),
            params,
            read: RefCell::default(),
            is_told: Cell::new(false),
        })
    }

    /// A section with parameters that earlier versions had in place of a plugin.
    pub(super) fn section(name: &'a str, node: &'a Node) -> Self {
        let place = Place::Line(node.line);
        Self { params: Some(node), ..Self::implied(name, place) }
    }

    /// A plugin with a name only, which is the name of its type.
    fn implied(kind: &'a str, place: Place) -> Self {
        Self { name: kind, kind, place, params: None, read: RefCell::default(), is_told: Cell::new(false) }
    }

    /// Returns where the parameters are, if they are not a map.
    pub(super) fn odd_parameters(&self) -> Option<Place> {
        let params = self.params.filter(|params| !matches!(&params.value, crate::yaml::Value::Map(_)));
        params.map(|params| Place::Line(params.line))
    }

    /// Returns a parameter.
    pub(super) fn param(&self, key: &str) -> Option<&'a Node> {
        self.read.borrow_mut().insert(key.to_owned());
        self.params?.get(key).filter(|node| !node.is_null())
    }

    /// Returns a parameter that is a text.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        self.param(key).and_then(Node::text)
    }

    /// Returns a parameter that is a number.
    ///
    /// # Errors
    /// It is something else.
    pub(super) fn number(&self, key: &str) -> anyhow::Result<Option<f64>> {
        self.param(key).map(|node| number(node, key)).transpose()
    }

    /// Returns a parameter that is a count.
    ///
    /// # Errors
    /// It is something else.
    pub(super) fn count(&self, key: &str) -> anyhow::Result<Option<u32>> {
        self.param(key).map(|node| count(node, key)).transpose()
    }

    /// Returns the parameters that were not looked at, with their lines.
    pub(super) fn unread(&self) -> Vec<(&'a str, Place)> {
        let read = self.read.borrow();
        let entries = self.params.map(Node::entries).unwrap_or_default();
        let unread = entries.iter().filter(|(key, _)| !read.contains(&key.text));
        unread.map(|(key, _)| (key.text.as_str(), Place::Line(key.line))).collect()
    }

    /// Returns whether a parameter was looked at.
    pub(super) fn has_read(&self, key: &str) -> bool {
        self.read.borrow().contains(key)
    }

    /// Marks all parameters as looked at.
    pub(super) fn read_all(&self) {
        let keys = self.params.map(Node::entries).unwrap_or_default().iter().map(|(key, _)| key.text.clone());
        self.read.borrow_mut().extend(keys);
    }
}

impl<'a> Profile<'a> {
    fn read(node: &'a Node) -> anyhow::Result<Self> {
        let name = node.get("name").and_then(Node::text);
        let name =
            name.with_context(|| format!("line {}: a scheduling profile without `name`", node.line))?;
        let entries: anyhow::Result<Vec<_>> = list(node, "plugins")?.iter().map(Entry::read).collect();
        Ok(Self { name, line: node.line, entries: entries? })
    }
}

impl<'a> Entry<'a> {
    fn read(node: &'a Node) -> anyhow::Result<Self> {
        let plugin = node.get("pluginRef").and_then(Node::text);
        let plugin = plugin.with_context(|| format!("line {}: an entry without `pluginRef`", node.line))?;
        let weight = node.get("weight").filter(|weight| !weight.is_null());
        let weight = weight.map(|weight| number(weight, "weight")).transpose()?;
        Ok(Self { plugin, place: Place::Line(node.line), weight })
    }
}

/// Returns the elements of a key's list; none when the key is missing.
fn list<'a>(node: &'a Node, key: &str) -> anyhow::Result<&'a [Node]> {
    match node.get(key).filter(|list| !list.is_null()) {
        None => Ok(&[]),
        Some(list) if matches!(list.value, crate::yaml::Value::List(_)) => Ok(list.list()),
        Some(list) => bail!("line {}: `{key}` is not a list", list.line),
    }
}

/// Returns a finite number.
///
/// # Errors
/// The node is something else.
pub(super) fn number(node: &Node, key: &str) -> anyhow::Result<f64> {
    let text = node.text().unwrap_or_default();
    let number = text.parse().ok().filter(|number: &f64| number.is_finite());
    number.with_context(|| format!("line {}: {key}: `{}` is not a number", node.line, plain(text)))
}

/// Returns a whole number from 0 that fits a `u32`.
///
/// # Errors
/// The node is something else.
pub(super) fn count(node: &Node, key: &str) -> anyhow::Result<u32> {
    let text = node.text().unwrap_or_default();
    text.parse().ok().with_context(|| {
        format!("line {}: {key}: `{}` is not a number from 0 to 4294967295", node.line, plain(text))
    })
}
