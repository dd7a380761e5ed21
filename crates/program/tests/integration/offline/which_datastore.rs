//! The datastore that commands choose when no option names one.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The exit code and standard error of `tortie` in a home with these variables. `TMPDIR` has the folder of the user's lab.
fn tortie(home: &Path, variables: &[(&str, &str)], arguments: &str) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tortie"))
        .args(arguments.split(' '))
        .env_clear()
        .env("HOME", home)
        .env("TMPDIR", home)
        .envs(variables.iter().copied())
        .current_dir(home)
        .output()
        .unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// Commands that read, that change, and that change a Kubernetes API.
const COMMANDS: [&str; 6] = ["get pods", "delete gnp deny", "status", "install", "uninstall", "calico stop"];

#[test]
fn all_commands_choose_the_cluster_of_kubectl_without_a_lab() {
    let home = tempfile::tempdir().unwrap();
    for command in COMMANDS {
        let (code, errors) = tortie(home.path(), &[], command);
        assert!(code == 2 && errors.contains("no lab is running in "), "{command}: {errors}");
        let (code, errors) = tortie(home.path(), &[("KUBECONFIG", "/nonexistent/config")], command);
        assert!(code == 2 && errors.contains("/nonexistent/config"), "{command}: {errors}");
    }
    fs::create_dir(home.path().join(".kube")).unwrap();
    let server = "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n\
                  users: [{name: u, user: {}}]\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n";
    fs::write(home.path().join(".kube/config"), server).unwrap();
    for command in COMMANDS {
        let (code, errors) = tortie(home.path(), &[], command);
        assert!(code == 2 && errors.contains("http://127.0.0.1:1"), "{command}: {errors}");
        let is_change = !["get pods", "status"].contains(&command);
        let line = format!(
            "datastore: kubernetes ({}) at http://127.0.0.1:1\n",
            home.path().join(".kube/config").display()
        );
        assert_eq!(errors.starts_with(&line), is_change, "{command}: {errors}");
        // A variable that names a lab means a lab.
        let (code, errors) = tortie(home.path(), &[("TORTIE_LAB", "/nonexistent/lab")], command);
        assert!(code == 2 && errors.contains("no lab is running in /nonexistent/lab"), "{command}: {errors}");
    }
}

#[test]
fn no_command_for_a_killed_lab_reaches_the_cluster_of_kubectl() {
    let home = tempfile::tempdir().unwrap();
    let lab = home.path().join("lab");
    fs::create_dir(&lab).unwrap();
    let mark = "This folder belongs to `tortie lab`, which removes all that is in it.\n";
    fs::write(lab.join("tortie-lab"), mark).unwrap();
    fs::write(lab.join("store.redb"), "data").unwrap();
    let lab_name = lab.display().to_string();
    let variables = [("KUBECONFIG", "/nonexistent/config"), ("TORTIE_LAB", lab_name.as_str())];
    for command in COMMANDS {
        let (code, errors) = tortie(home.path(), &variables, command);
        assert!(code == 2 && errors.contains("has ended without `tortie lab down`"), "{command}: {errors}");
    }
    let (code, errors) = tortie(home.path(), &variables, "lab down");
    assert!(code == 0 && !lab.exists(), "{errors}");
    let (code, errors) = tortie(home.path(), &variables, "lab down");
    assert!(code == 2 && errors.contains("no lab is running"), "{errors}");
}

#[test]
fn daemons_need_a_named_datastore() {
    let home = tempfile::tempdir().unwrap();
    for command in ["agent --node n", "controllers"] {
        let (code, errors) = tortie(home.path(), &[("KUBECONFIG", "/nonexistent/config")], command);
        assert!(code == 2 && errors.contains("say which datastore with --store or TORTIE_STORE"), "{errors}");
    }
}

#[test]
fn an_installation_refuses_other_datastores() {
    let home = tempfile::tempdir().unwrap();
    for command in ["install", "uninstall", "calico stop"] {
        let (code, errors) = tortie(home.path(), &[("TORTIE_STORE", "etcd:http://127.0.0.1:1")], command);
        assert!(code == 2 && errors.contains("is no Kubernetes API"), "{command}: {errors}");
        let both = format!("{command} --kubeconfig /a --store kubernetes:/b");
        let (code, errors) = tortie(home.path(), &[], &both);
        assert!(code == 2 && errors.contains("both name a datastore"), "{command}: {errors}");
        // An option comes before a variable.
        let one = format!("{command} --kubeconfig /nonexistent/a");
        let (code, errors) = tortie(home.path(), &[("TORTIE_STORE", "etcd:http://127.0.0.1:1")], &one);
        assert!(code == 2 && errors.contains("/nonexistent/a"), "{command}: {errors}");
    }
}
