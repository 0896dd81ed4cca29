//! `forebay-server check`: the effect of a configuration, before anything is started.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::process::Command;

use support::Place;

fn check(place: &Place) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-server"));
    let output = command.args(["check", "--config"]).arg(place.config()).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[test]
fn check_explains_the_configuration_and_changes_nothing() {
    let place = Place::new("auto");
    let config = std::fs::read_to_string(place.config()).unwrap();
    let pool = place.scratch.path().join("new");
    let text = config.replace(&place.pool().display().to_string(), &pool.display().to_string());
    std::fs::write(
        place.config(),
        text.replace("[admin]", "advertise = [\"interface:lo\"]\n[admin]") + "create = true\n",
    )
    .unwrap();
    let (code, said) = check(&place);
    assert_eq!(code, 0, "{said}");
    for line in
        ["new will be created", "advertised  127.0.0.1:0", "capacity of volumes is not enforced", ": valid\n"]
    {
        assert!(said.contains(line), "{line:?} is not in\n{said}");
    }
    assert!(!pool.exists() && !place.socket().exists());
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-server"));
    command.args(["check", "--config"]).arg(place.config());
    for output in [
        command.env("FOREBAY_ADVERTISE", "nas.example:445,240.1.2.0/24").output().unwrap(),
        command
            .env_remove("FOREBAY_ADVERTISE")
            .arg("--advertise=nas.example:445,240.1.2.0/24")
            .output()
            .unwrap(),
    ] {
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(
            said.contains("advertised  nas.example:445\n") && said.contains("warning: 240.1.2.0/24"),
            "{said}"
        );
    }
    let daemon = place.start();
    let (code, said) = check(&place);
    assert_eq!(code, 0, "beside the running server: {said}");
    assert!(pool.is_dir());
    drop(daemon);
}

#[test]
fn check_exits_with_the_code_of_the_startup_error() {
    let place = Place::new("auto");
    place.configure("127.0.0.1:0", &place.scratch.path().join("missing"));
    let (code, said) = check(&place);
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("the server would not start") && said.contains("ERROR: "), "{said}");
    assert_eq!(place.fails().0, 4);
}
