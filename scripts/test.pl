#!/usr/bin/perl
# Builds all tests and runs them, several programs of tests at once: what most of them wait for is links, timers and guests that boot, and one
# after the other they leave a machine idle for two thirds of its time. `cargo test` runs the same programs in turn.
#
#   scripts/test.pl [CARGO ARGUMENTS...]
#
# Arguments go to `cargo test`, behind what selects all tests in the profile `tested` (with `-p`, those of a package); after `--`, to each program.
# TEST_JOBS: how many programs run at once; as many as there are processors unless set.
use strict;
use warnings;
use Cwd qw(getcwd);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use JSON::PP;
use Time::HiRes qw(time);

# What measures the machine has it to itself, before the others.
my %alone = map { $_ => 1 } ('godwit-wan emulated_path', 'godwit-link sessions', 'godwit-predict log_cost');
# What takes longest begins first.
my @first = ('godwit-lab runs', 'godwit all', 'godwit-memory qemu', 'godwit-controller all');

my (@cargo, @each);
while (@ARGV) {
    my $word = shift;
    if ($word eq '--') { @each = @ARGV; last }
    push @cargo, $word;
}
chomp(my $processors = `nproc`);
my $jobs = $ENV{TEST_JOBS} || $processors;
die "TEST_JOBS=$jobs is no number of programs\n" unless $jobs =~ /^[1-9]\d*$/;

my @packages = (grep { /^(-p|--package)/ } @cargo) ? () : ('--workspace');
my @build = (qw(cargo test --profile tested --locked --lib --bins --tests), @packages, @cargo);
open(my $made, '-|', @build, qw(--no-run --message-format=json-render-diagnostics)) or die "cargo: $!\n";
my @programs;
while (my $line = <$made>) {
    next unless $line =~ /^\{/;
    my $it = decode_json($line);
    next unless $it->{reason} eq 'compiler-artifact' && $it->{profile}{test} && $it->{executable};
    my ($package) = $it->{package_id} =~ /#([^@]+)@/ or die "cargo calls a package $it->{package_id}\n";
    my $kind = $it->{target}{kind}[0];
    my $select = $kind eq 'test' ? "--test $it->{target}{name}" : $kind eq 'bin' ? "--bin $it->{target}{name}" : '--lib';
    push @programs, {
        name => "$package $it->{target}{name}",
        select => "-p $package $select",
        folder => dirname($it->{manifest_path}),
        program => $it->{executable},
    };
}
close($made) or exit(($? >> 8) || 1);
die "cargo names no program of tests\n" unless @programs;
if (@packages) {
    my %there = map { $_->{name} => 1 } @programs;
    $there{$_} or die "scripts/test.pl names `$_`, which is no program of tests\n" for keys %alone, @first;
}

my %order = map { $first[$_] => $_ - @first } 0 .. $#first;
@programs = sort { ($order{$a->{name}} // 0) <=> ($order{$b->{name}} // 0) or $a->{name} cmp $b->{name} } @programs;
my @measuring = grep { $alone{$_->{name}} } @programs;
my @others = grep { !$alone{$_->{name}} } @programs;

# Of what a test that failed has said, so much is said once more at the end, where it is found without reading all.
my $panic_lines = 8;

my $outputs = tempdir(CLEANUP => 1);
my ($root, $began, $started, %running, @failed) = (getcwd(), time, 0);
# Whoever is interrupted ends the programs that it started; what those leave the next tests remove.
for my $signal (qw(INT TERM HUP)) {
    $SIG{$signal} = sub {
        kill 'TERM', keys %running;
        1 while wait != -1;
        exit 130;
    };
}

sub start {
    my ($it) = @_;
    $it->{output} = "$outputs/" . ++$started;
    $it->{began} = time;
    defined(my $pid = fork) or die "fork: $!\n";
    if (!$pid) {
        $SIG{$_} = 'DEFAULT' for qw(INT TERM HUP);
        open(STDIN, '<', '/dev/null') or die;
        open(STDOUT, '>', $it->{output}) or die;
        open(STDERR, '>&', \*STDOUT) or die;
        chdir $it->{folder} or die "$it->{folder}: $!\n";
        # As cargo does; a path below its target folder is relative to where it was called.
        $ENV{CARGO_MANIFEST_DIR} = $it->{folder};
        my $program = $it->{program} =~ m{^/} ? $it->{program} : "$root/$it->{program}";
        exec $program, @each or die "$program: $!\n";
    }
    $running{$pid} = $it;
}

sub ended {
    my $pid = wait;
    my ($it, $status) = (delete $running{$pid}, $?);
    return unless $it;
    printf "     Running %s (%.1f s, after %.0f s)\n", $it->{name}, time - $it->{began}, time - $began;
    open(my $said, '<', $it->{output}) or die;
    my $lines = 0;
    while (<$said>) {
        print;
        $lines = $panic_lines if / panicked at /;
        push @{$it->{panics}}, '        ' . substr($_, 0, 400) . (length > 400 ? "...\n" : '') if $lines-- > 0;
    }
    close $said;
    unlink $it->{output};
    push @failed, $it if $status;
}

$| = 1;
printf "%d programs of tests, %d at once\n", scalar @programs, $jobs;
for my $queue ([1, @measuring], [$jobs, @others]) {
    my ($most, @queue) = @$queue;
    while (@queue || %running) {
        start(shift @queue) while @queue && keys %running < $most;
        ended();
    }
}
printf "%d programs of tests in %.0f s\n", scalar @programs, time - $began;
if (@failed) {
    print STDERR "failed: @{[scalar @failed]}\n",
        map {; "    cargo test --profile tested $_->{select}\n", @{$_->{panics} // []} } @failed;
    exit 1;
}
