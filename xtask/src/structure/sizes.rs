//! Sizes of files and functions, line widths, and how long doc comments are.

use std::fmt::Write as _;

use syn::{spanned::Spanned as _, visit::Visit};

use super::{modules::Module, syntax};

/// Longest line that rustfmt leaves; comments keep to it by hand.
pub(crate) const MAX_WIDTH: usize = 110;
/// Longest file, tests left out.
pub(crate) const MAX_FILE_LINES: usize = 400;

/// Collected sizes of many files.
#[derive(Debug, Default)]
pub(crate) struct Sizes {
    files: Vec<usize>,
    functions: Vec<usize>,
    wide_lines: usize,
    doc_comments: usize,
    short_doc_comments: usize,
}

impl Sizes {
    /// Adds one file; returns its lines without tests.
    pub(crate) fn add(&mut self, module: &Module) -> usize {
        let lines = lines(module);
        self.files.push(lines);
        self.wide_lines += wide_lines(module).count();
        let mut functions = Functions::default();
        functions.visit_file(&module.syntax);
        self.functions.extend(functions.lines);
        self.count_doc_comments(module);
        lines
    }

    /// Counts runs of `///` lines, and those of four words or fewer.
    fn count_doc_comments(&mut self, module: &Module) {
        let mut words = 0;
        for line in module.text.lines().chain([""]) {
            if let Some(doc) = line.trim_start().strip_prefix("///") {
                words += doc.split_whitespace().count();
            } else if words > 0 {
                self.doc_comments += 1;
                self.short_doc_comments += usize::from(words <= 4);
                words = 0;
            }
        }
    }

    /// The sizes as a table.
    pub(crate) fn table(&self) -> String {
        let mut table = String::new();
        for (what, values) in [("file lines", &self.files), ("function lines", &self.functions)] {
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let at = |share: f64| percentile(&sorted, share);
            let (p50, p90, p99) = (at(0.5), at(0.9), at(0.99));
            let _ = writeln!(
                table,
                "{what:<16} n {:>5}  p50 {p50:>4}  p90 {p90:>4}  p99 {p99:>4}  max {:>4}",
                sorted.len(),
                at(1.0),
            );
        }
        let _ = writeln!(table, "lines over {MAX_WIDTH} columns: {}", self.wide_lines);
        let _ = write!(
            table,
            "doc comments: {}, of four words or fewer: {}",
            self.doc_comments, self.short_doc_comments
        );
        table
    }
}

/// The value below which `share` of the sorted values lie (nearest rank).
fn percentile(sorted: &[usize], share: f64) -> usize {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

/// Lines of a file without its inline test modules.
pub(crate) fn lines(module: &Module) -> usize {
    let tests = module.syntax.items.iter().filter_map(|item| match item {
        syn::Item::Mod(tests) if syntax::is_test(&tests.attrs) => Some(span_lines(tests.span())),
        _ => None,
    });
    module.text.lines().count().saturating_sub(tests.sum())
}

/// Numbers of the lines that are wider than [`MAX_WIDTH`]; lines with a URL may be.
fn wide_lines(module: &Module) -> impl Iterator<Item = usize> {
    let numbered = module.text.lines().enumerate();
    let wide = |line: &str| line.chars().count() > MAX_WIDTH && !line.contains("://");
    numbered.filter(move |(_, line)| wide(line)).map(|(at, _)| at + 1)
}

fn span_lines(span: proc_macro2::Span) -> usize {
    span.end().line - span.start().line + 1
}

#[derive(Default)]
struct Functions {
    lines: Vec<usize>,
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !syntax::is_test(&module.attrs) {
            syn::visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.lines.push(span_lines(function.block.span()));
        syn::visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.lines.push(span_lines(function.block.span()));
        syn::visit::visit_impl_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let sorted: Vec<usize> = (1..=10).collect();
        assert_eq!([0.5, 0.9, 0.99, 1.0].map(|share| percentile(&sorted, share)), [5, 9, 10, 10]);
        assert_eq!(percentile(&[], 0.5), 0);
    }
}
