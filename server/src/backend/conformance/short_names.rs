//! 8.3 names.

use forebay_smb::short_name;

use super::*;

#[test]
fn short_names_resolve_to_long_names_unless_ambiguous() {
    let f = Fixture::new();
    let make = |path: &str, kind| {
        f.open(OpenRequest { mode: OpenMode::New, kind, ..request(path) }).expect("made");
    };
    let long = |path: &str| {
        let path = RelPath::new(path).expect("a path");
        match f.run(FsOpKind::LongPath { volume: f.volume.clone(), path }) {
            Ok(FsReply::Path(path)) => path.as_str().to_owned(),
            _ => panic!("a path answers Path"),
        }
    };
    make("a long directory", ObjectKind::Directory);
    make("a long directory/a long name.text", ObjectKind::File);
    for i in 0..700 {
        make(&format!("a long directory/another name {i}"), ObjectKind::File);
    }
    let directory = short_name::of("a long directory");
    let file = short_name::of("a long name.text");
    let whole = "a long directory/a long name.text";
    for path in [format!("{directory}/{file}"), format!("a long directory/{file}")] {
        assert_eq!(long(&path), whole);
    }
    let mixed = format!("{directory}/new/{file}");
    assert_eq!(long(&mixed), format!("a long directory/new/{file}"), "the rest may not be there");
    for unknown in ["AAAAAA~1", "none/AAAAAA~1", ""] {
        assert_eq!(long(unknown), unknown);
    }
    // A file with exactly this name takes precedence.
    make(&format!("a long directory/{file}"), ObjectKind::File);
    assert_eq!(long(&format!("{directory}/{file}")), format!("a long directory/{file}"));
    // Two files with the same short name.
    let twins = ["twin number 6411", "twin number 36941"];
    let short = short_name::of(twins[0]);
    assert_eq!(short, short_name::of(twins[1]));
    make(twins[0], ObjectKind::File);
    assert_eq!(long(&short), twins[0]);
    make(twins[1], ObjectKind::File);
    assert_eq!(long(&short), short);
}
