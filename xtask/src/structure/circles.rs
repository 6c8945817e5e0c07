//! Finds circles in the imports between the modules of a crate: between children of one parent, at every
//! level. A path that goes through a re-export counts as an import of the defining module. Tests are left
//! out.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::Context as _;
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Item, UseTree};

/// Maximum number of re-exports between a path and the module that defines its item.
const MAX_REEXPORTS: usize = 8;

/// Path of a module or of an item.
type Names = Vec<String>;

/// Paths that a module mentions, and what each name that it imports stands for.
#[derive(Default)]
struct Module {
    mentioned: Vec<Names>,
    imports: BTreeMap<String, Names>,
}

/// Modules by their path from the root of the crate.
type Modules = BTreeMap<Names, Module>;

/// Returns a line for each import that is part of a circle, in the crate with this root file.
pub(super) fn broken(krate: &str, root: &Path) -> anyhow::Result<Vec<String>> {
    let mut modules = Modules::new();
    read(root, &Names::new(), &root.with_file_name(""), &mut modules)?;
    // Parent -> pair of its children -> an import that shows the edge.
    let mut levels = BTreeMap::<Names, BTreeMap<(String, String), String>>::new();
    for (from, module) in &modules {
        for to in module.mentioned.iter().filter_map(|path| resolve(&modules, from, path, 0)) {
            let shared = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
            if let (Some(one), Some(other)) = (from.get(shared), to.get(shared)) {
                let example = format!("{} -> {}", from.join("::"), to.join("::"));
                let edges = levels.entry(from.iter().take(shared).cloned().collect()).or_default();
                edges.entry((one.clone(), other.clone())).or_insert(example);
            }
        }
    }
    let mut broken = Vec::new();
    for (parent, edges) in levels {
        let in_circles = edges.iter().filter(|((from, to), _)| reachable(&edges, to).contains(from.as_str()));
        let parent = parent.join("::");
        broken.extend(
            in_circles.map(|(_, example)| format!("{krate}: import circle in `{parent}`: {example}")),
        );
    }
    Ok(broken)
}

fn reachable<'e>(edges: &'e BTreeMap<(String, String), String>, from: &'e str) -> BTreeSet<&'e str> {
    let (mut reached, mut open) = (BTreeSet::from([from]), vec![from]);
    while let Some(node) = open.pop() {
        let next = edges.keys().filter(|(from, _)| from == node).map(|(_, to)| to.as_str());
        open.extend(next.filter(|to| reached.insert(to)));
    }
    reached
}

/// Returns the module that defines the item of `path`, as seen from module `at`.
fn resolve(modules: &Modules, at: &Names, path: &[String], depth: usize) -> Option<Names> {
    let mut here = at.clone();
    for (place, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" if place == 0 => here.clear(),
            "self" if place == 0 => {}
            "super" => drop(here.pop()),
            _ => {
                here.push(name.clone());
                if !modules.contains_key(&here) {
                    here.pop();
                    let import = modules.get(&here)?.imports.get(name).filter(|_| depth < MAX_REEXPORTS);
                    let defining = import.and_then(|import| resolve(modules, &here, import, depth + 1));
                    // The first name of a path that is neither a module nor an import belongs to another
                    // crate.
                    return defining.or((place > 0).then_some(here));
                }
            }
        }
    }
    modules.contains_key(&here).then_some(here)
}

/// Reads a file, and the files of the modules that it declares, which are in `dir`.
fn read(file: &Path, path: &Names, dir: &Path, modules: &mut Modules) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let syntax = syn::parse_file(&text).with_context(|| format!("cannot parse {}", file.display()))?;
    let mut module = Module::default();
    for item in &syntax.items {
        match item {
            Item::Mod(child) if is_test(&child.attrs) => {}
            Item::Fn(function) if is_test(&function.attrs) => {}
            Item::Impl(block) if is_test(&block.attrs) => {}
            Item::Use(import) if is_test(&import.attrs) => {}
            Item::Use(import) => flatten(&import.tree, &Names::new(), &mut module),
            Item::Mod(child) if child.content.is_none() => {
                let name = child.ident.to_string();
                let file = dir.join(format!("{name}.rs"));
                // A module without such a file is generated or has a `path` attribute.
                if file.is_file() {
                    read(
                        &file,
                        &[&path[..], std::slice::from_ref(&name)].concat(),
                        &dir.join(name),
                        modules,
                    )?;
                }
            }
            item => {
                let mut text = String::new();
                write_paths(item.to_token_stream(), &mut text);
                let paths = text.split(' ').map(|path| path.split("::").map(str::to_owned).collect());
                module.mentioned.extend(paths);
            }
        }
    }
    let anchored = ["crate", "super", "self"];
    module.mentioned.retain(|path| path.len() > 1 && anchored.contains(&path[0].as_str()));
    modules.insert(path.clone(), module);
    Ok(())
}

/// Whether an item exists only in tests or under a checker.
fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().filter(|attr| attr.path().is_ident("cfg")).any(|attr| {
        let condition = attr.to_token_stream().to_string();
        !condition.contains("not") && (condition.contains("test") || condition.contains("loom"))
    })
}

fn flatten(tree: &UseTree, before: &Names, module: &mut Module) {
    let with = |ident: &syn::Ident| [&before[..], &[ident.to_string()]].concat();
    let (name, path) = match tree {
        UseTree::Path(path) => return flatten(&path.tree, &with(&path.ident), module),
        UseTree::Group(group) => return group.items.iter().for_each(|tree| flatten(tree, before, module)),
        UseTree::Glob(_) => (String::new(), before.clone()),
        UseTree::Rename(rename) => (rename.rename.to_string(), with(&rename.ident)),
        UseTree::Name(name) if name.ident == "self" => {
            (before.last().cloned().unwrap_or_default(), before.clone())
        }
        UseTree::Name(name) => (name.ident.to_string(), with(&name.ident)),
    };
    module.mentioned.push(path.clone());
    module.imports.insert(name, path);
}

/// Writes the paths of code, also inside macro calls, after spaces: ` crate::a::b `. Literals are left out.
fn write_paths(tokens: TokenStream, out: &mut String) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) if out.ends_with("::") => out.push_str(&ident.to_string()),
            TokenTree::Ident(ident) => out.push_str(&format!(" {ident}")),
            TokenTree::Punct(punct) if punct.as_char() == ':' => out.push(':'),
            TokenTree::Group(group) => {
                out.push(' ');
                write_paths(group.stream(), out);
                out.push(' ');
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => out.push(' '),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::broken;

    /// Returns the circles of a crate with these files.
    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(dir.path().join(name), text).unwrap());
        broken("k", &dir.path().join("lib.rs")).unwrap()
    }

    #[test]
    fn a_circle_between_siblings_is_found_through_a_re_export_and_within_a_macro() {
        let lib = ("lib.rs", "mod a;\nmod b;\nmod c;\npub use c::C;\n");
        let c = ("c.rs", "pub struct C;\n#[cfg(test)]\nuse crate::b::B;\n");
        let direct = [lib, c, ("a.rs", "use crate::b::B;"), ("b.rs", "/// [`crate::a`]\npub struct B;")];
        assert!(circles(&direct).is_empty());
        let through =
            [lib, ("c.rs", "use super::a::A;\npub struct C;"), ("a.rs", "fn f(c: crate::C) {}"), direct[3]];
        assert_eq!(circles(&through), ["k: import circle in ``: a -> c", "k: import circle in ``: c -> a"]);
        let within =
            [lib, c, ("a.rs", "fn f() { m!(x, crate::b::<u8>()); }"), ("b.rs", "fn g() -> crate::a::A {}")];
        assert_eq!(circles(&within).len(), 2);
    }

    #[test]
    fn a_parent_and_its_children_may_use_each_other() {
        let files = [
            ("lib.rs", "mod a;\n"),
            ("a.rs", "mod x;\nmod y;\nuse self::x::X;\npub struct A;\n"),
            ("a/x.rs", "use super::A;\npub struct X;\n"),
            ("a/y.rs", "use super::x::X;\n"),
        ];
        assert!(circles(&files).is_empty());
    }
}
