//! `tortie matrix -o html`: one self-contained file, for light and dark screens.

use std::fmt::Write;

use tortie_oracle::Verdict;
use tortie_reach::Classes;

use crate::decided;
use crate::table::{Because, Reasons, Table, shown};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2530; --paper: #fbfbf9; --line: #d9dcd6; --faint: #68737f; --note: #ffffff;
  --all: #bfe3c6; --none: #f3c5bf; --some: #f6e3a6; --nothing: transparent; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --paper: #15191e; --line: #333b44; --faint: #94a0ac;
  --note: #222931; --all: #235233; --none: #66302b; --some: #62521b; } }
body { margin: 2rem; font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 .6rem; }
p, li { color: var(--faint); margin: .2rem 0; max-width: 70ch; } ul { padding-left: 1.2rem; }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: separate; border-spacing: 0; }
th, td { border-right: 1px solid var(--line); border-bottom: 1px solid var(--line); padding: .35rem .6rem; }
thead th { position: sticky; top: 0; background: var(--paper); z-index: 2; vertical-align: bottom; text-align: left;
  font-weight: 600; max-width: 11rem; overflow-wrap: anywhere; }
tbody th { position: sticky; left: 0; background: var(--paper); z-index: 1; text-align: left; font-weight: 600;
  max-width: 22rem; overflow-wrap: anywhere; }
thead th:first-child { left: 0; z-index: 3; color: var(--faint); font-weight: 400; }
td { position: relative; text-align: center; cursor: default; font-variant-numeric: tabular-nums; min-width: 3.2rem; }
td.all { background: var(--all); } td.none { background: var(--none); } td.some { background: var(--some); }
td.nothing { color: var(--faint); }
td:hover, td:focus { outline: 2px solid var(--ink); outline-offset: -2px; }
td .why { display: none; position: absolute; left: 50%; top: 100%; z-index: 9; width: max-content; max-width: 34rem;
  padding: .5rem .7rem; text-align: left; background: var(--note); border: 1px solid var(--line); border-radius: 6px;
  box-shadow: 0 4px 16px rgb(0 0 0 / 25%); white-space: normal; }
td:hover .why, td:focus .why { display: block; }
.why div { margin: .15rem 0; } .why b { font-weight: 600; }
details { margin-top: 1.5rem; } summary { cursor: pointer; color: var(--faint); }
.key span { display: inline-block; padding: .05rem .6rem; margin-right: .4rem; border-radius: 4px; color: var(--ink); }
";

/// The whole page.
pub(crate) fn page(classes: &Classes, tables: &[Table], reasons: &[Reasons], notes: &[String]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"/>\n<title>Who reaches whom</title>\n<style>{STYLE}</style>\n\
         </head>\n<body>\n<h1>Who reaches whom</h1>\n"
    );
    page.push_str(
        "<p class=\"key\"><span style=\"background:var(--all)\">all</span><span style=\"background:var(--some)\">some \
         ports</span><span style=\"background:var(--none)\">none</span>Point at a cell to see what decides.</p>\n<ul>\n",
    );
    for note in notes {
        let _ = writeln!(page, "<li>{}</li>", escaped(note));
    }
    page.push_str("</ul>\n");
    for (table, reasons) in tables.iter().zip(reasons) {
        add_table(&mut page, classes, table, reasons);
    }
    add_classes(&mut page, classes);
    page.push_str("</body>\n</html>\n");
    page
}

fn add_table(page: &mut String, classes: &Classes, table: &Table, reasons: &Reasons) {
    let _ = writeln!(page, "<h2>{}</h2>\n<div class=\"scroll\">\n<table>\n<thead>", escaped(&table.title));
    page.push_str("<tr><th>from \\ to</th>");
    for column in &table.matrix.columns {
        let _ = write!(page, "<th scope=\"col\">{}</th>", escaped(&column.name));
    }
    page.push_str("</tr>\n</thead>\n<tbody>\n");
    for ((row, contents), reasons) in table.matrix.rows.iter().zip(&table.matrix.cells).zip(reasons) {
        let _ = write!(page, "<tr><th scope=\"row\">{}</th>", escaped(&row.name));
        for ((column, content), reasons) in table.matrix.columns.iter().zip(contents).zip(reasons) {
            let text = shown(classes, table, content);
            let class = match (content, text.as_str()) {
                (content, _) if content.is_nothing() => "nothing",
                (_, "all") => "all",
                (_, "none") => "none",
                _ => "some",
            };
            let mark = table.mark(row, column, content);
            let _ = write!(page, "<td class=\"{class}\" tabindex=\"0\">{}{mark}", escaped(&text));
            if !content.is_nothing() {
                let _ = write!(
                    page,
                    "<div class=\"why\"><b>{} → {}</b>",
                    escaped(&row.name),
                    escaped(&column.name)
                );
                add_reasons(page, reasons);
                page.push_str("</div>");
            }
            page.push_str("</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody>\n</table>\n</div>\n");
}

/// The maximum number of reasons in a cell of many classes.
const MAX_REASONS: usize = 6;

fn add_reasons(page: &mut String, reasons: &[Because]) {
    for reason in reasons.iter().take(MAX_REASONS) {
        let word = if reason.verdict == Verdict::Allow { "passes" } else { "dropped" };
        let by: Vec<String> = reason
            .by
            .iter()
            .map(|(stop, by)| format!("{}: {}", decided::stop_name(*stop), escaped(by)))
            .collect();
        let _ = write!(page, "<div>{} <b>{word}</b> – {}</div>", escaped(&reason.ports), by.join("; "));
    }
    if reasons.len() > MAX_REASONS {
        let _ = write!(page, "<div>… and {} more</div>", reasons.len() - MAX_REASONS);
    }
}

/// The maximum number of listed members of a class.
const MAX_MEMBERS: usize = 20;

fn add_classes(page: &mut String, classes: &Classes) {
    let count = classes.all().len();
    let _ = writeln!(page, "<details>\n<summary>The {count} classes, and who is in them</summary>\n<ul>");
    for class in classes.all() {
        let members: Vec<String> = class.shown().take(MAX_MEMBERS).map(ToString::to_string).collect();
        let more = class.count().saturating_sub(MAX_MEMBERS);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let members = escaped(&members.join(", "));
        let _ = writeln!(page, "<li><b>{}</b>: {members}{more}</li>", escaped(&class.name));
    }
    page.push_str("</ul>\n</details>\n");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
