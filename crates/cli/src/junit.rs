//! Results in the form of JUnit, which CI systems read.

/// A named list of results.
pub(crate) struct Suite {
    /// What was tested, such as a file.
    pub(crate) name: String,
    pub(crate) cases: Vec<Case>,
}

/// One result.
pub(crate) struct Case {
    pub(crate) name: String,
    /// The line in the file of the suite.
    pub(crate) line: Option<usize>,
    /// Why it fails, if it does.
    pub(crate) failure: Option<String>,
}

impl Suite {
    /// The element `testsuite`, indented by two spaces for each level.
    fn element(&self, level: usize) -> String {
        let (indent, name) = ("  ".repeat(level), escaped(&self.name));
        let failed = self.cases.iter().filter(|case| case.failure.is_some()).count();
        let all = self.cases.len();
        let mut text = format!("{indent}<testsuite name=\"{name}\" tests=\"{all}\" failures=\"{failed}\">\n");
        for Case { name: case, line, failure } in &self.cases {
            let line = line.map(|line| format!(" line=\"{line}\"")).unwrap_or_default();
            let case = format!("{indent}  <testcase classname=\"{name}\" name=\"{}\"{line}", escaped(case));
            text += &match failure {
                None => format!("{case}/>\n"),
                Some(why) => format!(
                    "{case}>\n{indent}    <failure message=\"{}\"/>\n{indent}  </testcase>\n",
                    escaped(why)
                ),
            };
        }
        text + &indent + "</testsuite>\n"
    }
}

const HEADER: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";

/// A document with one suite.
pub(crate) fn document(suite: &Suite) -> String {
    HEADER.to_owned() + &suite.element(0)
}

/// A document with several suites.
pub(crate) fn documents(suites: &[Suite]) -> String {
    let suites: String = suites.iter().map(|suite| suite.element(1)).collect();
    format!("{HEADER}<testsuites>\n{suites}</testsuites>\n")
}

/// Text in an attribute. XML has no form for control characters.
fn escaped(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
