#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forebay_fuzz::smbdirect::smbdirect_messages(data));
