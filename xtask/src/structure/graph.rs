//! Finds the imports between the modules of a crate, and the circles in them.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    modules::Crate,
    syntax::{self, Import},
};

/// `(from, to)` for each pair of modules, as positions in [`Crate::modules`].
pub(crate) type Imports = BTreeSet<(usize, usize)>;

/// A circle between children of one parent.
#[derive(Debug)]
pub(crate) struct SiblingCircle {
    /// Path of the parent.
    pub(crate) parent: String,
    /// Names of the children in the circle.
    pub(crate) children: Vec<String>,
    /// One example import for each pair of children.
    pub(crate) examples: Vec<String>,
}

/// Returns the imports between the files of a crate. A path that goes through a re-export counts as an import
/// of the defining module.
pub(crate) fn imports(krate: &Crate) -> Imports {
    let resolver = Resolver::new(krate);
    let mut edges = Imports::new();
    for (from, module) in krate.modules.iter().enumerate() {
        for path in syntax::mentioned(&module.syntax) {
            if let Some(to) = resolver.resolve(&module.path, &path, 0).filter(|to| *to != from) {
                edges.insert((from, to));
            }
        }
    }
    edges
}

/// Returns the circles between the subtrees of siblings, at every level.
pub(crate) fn sibling_circles(krate: &Crate, imports: &Imports) -> Vec<SiblingCircle> {
    // parent -> (child, child) -> one import that shows the edge
    let mut levels: BTreeMap<Vec<String>, BTreeMap<(String, String), String>> = BTreeMap::new();
    for (from, to) in imports {
        let (Some(from), Some(to)) = (krate.modules.get(*from), krate.modules.get(*to)) else { continue };
        let shared = from.path.iter().zip(&to.path).take_while(|(a, b)| a == b).count();
        if let (Some(a), Some(b)) = (from.path.get(shared), to.path.get(shared)) {
            let parent = from.path.iter().take(shared).cloned().collect();
            let example = format!("{} -> {}", from.path.join("::"), to.path.join("::"));
            levels.entry(parent).or_default().entry((a.clone(), b.clone())).or_insert(example);
        }
    }
    let mut found = Vec::new();
    for (parent, edges) in levels {
        let names: BTreeSet<&String> = edges.keys().flat_map(|(a, b)| [a, b]).collect();
        let names: Vec<&String> = names.into_iter().collect();
        let position = |name: &String| names.iter().position(|other| *other == name).unwrap_or_default();
        let numbered = edges.keys().map(|(a, b)| (position(a), position(b))).collect();
        for circle in circles(names.len(), &numbered) {
            let inside = |name: &String| circle.contains(&position(name));
            let examples = edges.iter().filter(|((a, b), _)| inside(a) && inside(b));
            found.push(SiblingCircle {
                parent: parent.join("::"),
                children: circle.iter().filter_map(|at| names.get(*at).map(|name| (*name).clone())).collect(),
                examples: examples.map(|(_, example)| example.clone()).collect(),
            });
        }
    }
    found
}

/// Returns the strongly connected components of more than one node. Two nodes are in one component if each
/// reaches the other.
fn circles(nodes: usize, edges: &Imports) -> Vec<Vec<usize>> {
    let reach: Vec<BTreeSet<usize>> = (0..nodes).map(|from| reachable(from, edges)).collect();
    let reaches = |a: usize, b: usize| reach.get(a).is_some_and(|reached| reached.contains(&b));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for node in 0..nodes {
        if !seen.insert(node) {
            continue;
        }
        let mut circle = vec![node];
        circle.extend((node + 1..nodes).filter(|other| reaches(node, *other) && reaches(*other, node)));
        seen.extend(circle.iter().copied());
        if circle.len() > 1 {
            found.push(circle);
        }
    }
    found
}

fn reachable(from: usize, edges: &Imports) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(node) = open.pop() {
        for (_, to) in edges.range((node, 0)..=(node, usize::MAX)) {
            if reached.insert(*to) {
                open.push(*to);
            }
        }
    }
    reached
}

struct Resolver<'a> {
    by_path: BTreeMap<&'a [String], usize>,
    imports: Vec<Vec<Import>>,
}

impl<'a> Resolver<'a> {
    fn new(krate: &'a Crate) -> Self {
        let numbered = krate.modules.iter().enumerate();
        Self {
            by_path: numbered.map(|(at, module)| (module.path.as_slice(), at)).collect(),
            imports: krate.modules.iter().map(|module| syntax::imports(&module.syntax)).collect(),
        }
    }

    /// Returns the module that defines the item of `path`, as seen from module `at`.
    fn resolve(&self, at: &[String], path: &[String], depth: usize) -> Option<usize> {
        const MAX_REEXPORTS: usize = 8;
        let mut here = at.to_vec();
        let mut rest = path.iter();
        match rest.next().map(String::as_str)? {
            "crate" => here.clear(),
            "self" => {}
            "super" => drop(here.pop()),
            first => here.push(first.to_owned()),
        }
        let mut module = *self.by_path.get(here.as_slice())?;
        for name in rest {
            if name == "super" {
                here.pop();
                module = *self.by_path.get(here.as_slice())?;
                continue;
            }
            here.push(name.clone());
            if let Some(child) = self.by_path.get(here.as_slice()) {
                module = *child;
                continue;
            }
            here.pop();
            if depth < MAX_REEXPORTS
                && let Some(target) = self.reexported(module, &here, name, depth)
            {
                return Some(target);
            }
            return Some(module);
        }
        Some(module)
    }

    fn reexported(&self, module: usize, path: &[String], name: &str, depth: usize) -> Option<usize> {
        let imports = self.imports.get(module)?;
        let named = imports.iter().find(|import| import.name == name)?;
        self.resolve(path, &named.path, depth + 1)
    }
}
