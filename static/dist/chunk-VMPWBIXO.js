// Made of static/js by `make static`: change that instead.
function f(r,s,n){let e=0,t=0;async function i(){let a=++e,[o,u]=await r().then(c=>[s,c],()=>[n]);a===e&&o(u)}return a=>{clearTimeout(t),e++,t=setTimeout(i,a)}}function w(r){let s=0,n=0;return async()=>{let e=++s,t=await r();if(!(e<n))return n=e,t}}export{f as a,w as b};
